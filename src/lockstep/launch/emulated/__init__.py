"""Hosts emulated by network namespaces of this machine. network.py makes them, launcher.py starts ranks on them."""
