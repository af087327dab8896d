"""Right scripts of each framework, for one process or several ranks: what `lockstep attach` costs them, and what `lockstep predict` makes of them."""
