"""The backend `shm`: ranks of one host exchange through shared memory. Its door is group.py; segment.py explains the protocol."""
