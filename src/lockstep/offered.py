"""What other packages offer, by entry points: models, strategies, launchers and analyzers (docs/extending.md).

Names are read from what is installed, which imports none of it. A package is imported when its name is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from lockstep.errors import InputError
from lockstep.plugins import is_spec, load_object

GROUPS = {
    "model": "lockstep.models",
    "strategy": "lockstep.strategies",
    "launcher": "lockstep.launchers",
    "analyzer": "lockstep.analyzers",
}


@dataclass(frozen=True)
class Offer:
    """One entry point."""

    kind: str
    name: str
    spec: str
    """What it names, as package.module:object."""
    package: str
    """Its distribution, with its version."""

    @property
    def why(self) -> str:
        """The reason for a setting that is not what was written."""
        return f"'{self.name}', offered by the package {self.package}"

    def load(self) -> Any:
        """Import it; whatever goes wrong there is one line that names the package."""
        try:
            return load_object(self.spec, option=self.kind)
        except InputError as error:
            raise InputError(f"{self.why}: {error}") from None


@cache
def offers(kind: str) -> tuple[Offer, ...]:
    """All offers of a kind, by name. Reading what is installed takes some milliseconds, so it is done for names that are not ours."""
    from importlib.metadata import entry_points

    found = []
    for point in entry_points(group=GROUPS[kind]):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        found.append(Offer(kind, point.name, point.value.partition("[")[0].strip(), package))
    return tuple(sorted(found, key=lambda offer: (offer.name, offer.package)))


def find(kind: str, name: str) -> Offer | None:
    """What is offered under a name; None for nothing. Two packages with one name are an error: which one is meant is not ours to guess."""
    if ":" in name:
        return None
    found = [offer for offer in offers(kind) if offer.name == name]
    if len(found) > 1:
        packages = " and ".join(offer.package for offer in found)
        raise InputError(f"{kind}={name} is offered by {packages}: write {kind}={found[0].spec} for the first one")
    if found and not is_spec(found[0].spec):
        raise InputError(f"{found[0].why}: '{found[0].spec}' is not of the form package.module:object")
    return found[0] if found else None


def names(kind: str) -> list[str]:
    return list(dict.fromkeys(offer.name for offer in offers(kind)))
