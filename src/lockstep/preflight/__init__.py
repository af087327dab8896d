"""Every node, core and link of a placement, tried for some seconds before anything trains there.

May import launch/ and below. Its door is examine.py: `examine` asks every node in turns, one worker on each (worker.py, which asks node.py and
peer.py). judge.py says what of it is slow or wrong.
"""
