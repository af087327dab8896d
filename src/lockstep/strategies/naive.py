"""The strategy `naive`: one all-reduce for each parameter, after backward. It shows why DDP has buckets.

It does what `flat` does, in as many messages as there are parameters. On a link where a message takes 20 ms to arrive,
a net of eighteen parameters waits eighteen times as long for the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lockstep.strategies.flat import Flat


class Naive(Flat):
    """Flat with a bucket for each parameter."""

    def _divide(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        return ([parameter] for parameter in parameters)
