"""The user's own training loop under Lockstep: `lockstep run train.py`, `lockstep.session()`. Without torch until it starts."""
