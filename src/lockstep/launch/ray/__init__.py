"""Ranks as tasks of Ray: of one that Lockstep starts on this host and ends again, or of a cluster that is there. Its door is launcher.py."""
