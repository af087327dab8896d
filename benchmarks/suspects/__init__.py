"""Causes that are planted into scripts of the real frameworks: what `lockstep attach` with `explain`, and a peer, have to name first."""
