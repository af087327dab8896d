"""The backend `shm`."""


def register() -> str:
    raise RuntimeError("the shm backend is being written")
