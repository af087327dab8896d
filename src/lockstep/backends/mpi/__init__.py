"""The backend `mpi`: a process group on mpi4py, for wheels of PyTorch that were built without MPI. Its door is group.py."""
