"""Runs at the start of every Python process that a test starts: hands it to the zygote (server.py), where it can.

The process itself stays behind as a proxy: it passes signals on and ends as the forked process ended. What a fork could not
reproduce (another network namespace, inherited file descriptors, variables that libraries read while they load) starts cold, as
all processes do outside of the tests.
"""

import os
import sys

# Read while torch or a library below it loads, so a process that was forked later would not notice them.
READ_ON_LOAD = (
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MKL_DEBUG",
    "ONEDNN_",
    "OMPI_",
    "OPENBLAS_",
    "PMI",
    "PYTHON",
    "SLURM_",
    "TORCH_CPP_",
    "TORCH_DISTRIBUTED_",
    "TORCH_LOGS",
)
NAMESPACES = ("mnt", "net", "pid", "user")


def surroundings() -> dict[str, str]:
    """What must be the same for a fork of the zygote to be as good as a start."""
    found = {name: value for name, value in os.environ.items() if name.startswith(READ_ON_LOAD)}
    return found | {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


def can_be_forked(argv: list[str]) -> bool:
    """`python -m lockstep.…`, `python script.py` or the command `lockstep`, without options for the interpreter."""
    if len(argv) > 2 and argv[1] == "-m":
        return argv[2].startswith("lockstep.")
    return len(argv) > 1 and (argv[1].endswith(".py") or os.path.basename(argv[1]) == "lockstep")


def inherits_files() -> bool:
    """Whether a file descriptor beyond the standard three came from the parent."""
    return any(os.get_inheritable(fd) for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_open(fd))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False  # the descriptor of the listing itself
    return True


def run_in_zygote(address: str) -> None:
    """Ask the zygote for this process; returns only if it must start cold."""
    import json
    import resource
    import signal
    import socket

    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    request = json.dumps(
        {
            "argv": sys.orig_argv,
            "executable": sys.executable,
            "environment": dict(os.environ),
            "surroundings": surroundings(),
            "folder": os.getcwd(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "limits": {name: resource.getrlimit(number) for name, number in limits.items()},
        }
    ).encode(errors="surrogateescape")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    forwarded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
    received: list[int] = []
    for number in forwarded:
        signal.signal(number, lambda number, _: received.append(number))
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
    connection.sendall(request)
    if connection.recv(1) != b"y":
        signal.set_wakeup_fd(-1)
        for number in forwarded:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        connection.close()
        os.close(wake)
        os.close(woken)
        return
    import select

    while True:
        ready, _, _ = select.select([connection, wake], [], [])
        if wake in ready:
            connection.sendall(os.read(wake, 64))
        if connection in ready:
            answer = connection.recv(4)
            break
    if len(answer) < 4:
        os._exit(255)  # the zygote is gone
    status = int.from_bytes(answer, "little")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.set_wakeup_fd(-1)
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


_address = os.environ.get("LOCKSTEP_TEST_ZYGOTE")
if _address and can_be_forked(sys.orig_argv) and all(map(_is_open, (0, 1, 2))) and not inherits_files():
    run_in_zygote(_address)
