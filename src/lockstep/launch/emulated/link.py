"""What lies between emulated hosts, as text: "1gbit,0.5ms,0.1%" is rate, delay and loss, in any order, each optional.

The units are those of Linux's `tc`. Rate is what each host can send, and as much what it can receive; delay is one way,
so a round trip takes twice as long; loss is the share of packets that never arrive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from lockstep.errors import InputError

EXAMPLE = 'link="1gbit,0.5ms,0.1%"'
# Each quantity is kept as a whole number of its smallest unit, so that text and value are the same thing.
_UNITS = {
    "rate": {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1},  # bit/s
    "delay": {"s": 10**6, "ms": 10**3, "us": 1},  # microseconds
    "loss": {"%": 10**4},  # packets of a million
}
# Below 10 kbit/s a single full packet takes more than a second; above 400 Gbit/s nothing here can follow.
_LIMITS = {
    "rate": (10**4, 400 * 10**9, "10kbit to 400gbit"),
    "delay": (0, 10 * 10**6, "0ms to 10s, in steps of 1us"),
    "loss": (0, 99 * 10**4, "0% to 99%, in steps of 0.0001%"),
}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+|%)")


@dataclass(frozen=True)
class Link:
    """One cable from a host to the switch."""

    rate: int | None = None
    """Bits a second in each direction; None: as fast as the machine can."""
    delay_us: int = 0
    """Microseconds from host to host, one way."""
    loss_ppm: int = 0
    """Packets of a million that are lost."""

    @property
    def delay_s(self) -> float:
        return self.delay_us / 1e6

    @property
    def loss(self) -> float:
        return self.loss_ppm / 1e6

    def __str__(self) -> str:
        """The shortest text that gives this link again; empty where nothing is limited."""
        parts = []
        if self.rate is not None:
            parts.append(_text(self.rate, "rate"))
        if self.delay_us:
            parts.append(_text(self.delay_us, "delay"))
        if self.loss_ppm:
            parts.append(f"{Decimal(self.loss_ppm).scaleb(-4).normalize():f}%")
        return ",".join(parts)


def _text(value: int, quantity: str) -> str:
    unit, size = next((unit, size) for unit, size in _UNITS[quantity].items() if value % size == 0)
    return f"{value // size}{unit}"


def parse_link(text: str | None) -> Link:
    """The link that a text describes; no text is a link without limits."""
    if text is None:
        return Link()
    found: dict[str, int] = {}
    for part in text.split(","):
        quantity, value = _part(part.strip().lower(), text)
        if quantity in found:
            raise InputError(f"link={text!r} states its {quantity} twice: leave one out, for example {EXAMPLE}")
        found[quantity] = value
    return Link(rate=found.get("rate"), delay_us=found.get("delay", 0), loss_ppm=found.get("loss", 0))


def _part(part: str, text: str) -> tuple[str, int]:
    match = _PART.fullmatch(part)
    quantity = next((name for name, units in _UNITS.items() if match and match.group(2) in units), None)
    if match is None or quantity is None:
        raise InputError(
            f"link={text!r}: {part!r} is neither a rate (1gbit, 100mbit), a delay (0.5ms, 50us) nor a loss (0.1%); "
            f"write for example {EXAMPLE}"
        )
    value = Decimal(match.group(1)) * _UNITS[quantity][match.group(2)]
    low, high, words = _LIMITS[quantity]
    if not low <= value <= high or value != int(value):
        raise InputError(f"link={text!r}: {part!r} is out of range: a {quantity} is {words}, for example {EXAMPLE}")
    return quantity, int(value)
