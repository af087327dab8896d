"""The strategy `flat` with an exchange that takes longer on every rank: `strategy=slow_exchange.py:SlowExchange`."""

from __future__ import annotations

from lockstep.strategies.flat import Flat


class SlowExchange(Flat):
    def exchange(self) -> None:
        from plants import current  # the script's own; the strategy is also looked at where there is no script

        current().pause("exchange")
        super().exchange()
