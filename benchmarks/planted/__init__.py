"""Causes that are really planted into a training, each with a size: what `lockstep explain` and a peer have to find."""
