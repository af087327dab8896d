"""A link and switch in user space, for kernels without netem: rate, delay and loss between emulated hosts.

`python -m lockstep.launch.emulated.switch LINK NAMESPACE=ADDRESS…` makes an interface `eth0` in each network namespace, says
"up", and carries packets between them until it is ended or its parent is.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from lockstep.launch.emulated.link import Link, parse_link
from lockstep.process import die_with_parent

INTERFACE = "eth0"
# How long a packet may wait for its turn on a cable before it is dropped, as at a switch with little memory.
QUEUE_S = 0.05

CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6 = 0x01, 0x02, 0x04
# Every packet comes with 10 bytes in front that say how to finish its checksum and where to cut it into segments.
_HEADER = 10
_IPV4, _TARGET = _HEADER, slice(_HEADER + 16, _HEADER + 20)
_LONGEST = _HEADER + 65535
# Packets taken from one host before the others get a turn and what is due is delivered.
_TURN = 32


class Wire:
    """When a packet arrives, or that it does not. Each host has one full-duplex cable to a switch."""

    def __init__(self, link: Link, chance: random.Random) -> None:
        self.link = link
        self.chance = chance
        self.sending: dict[int, float] = {}
        """Until when each host's cable is busy towards the switch …"""
        self.receiving: dict[int, float] = {}
        """… and from it."""

    def arrival(self, now: float, source: int, target: int, size: int) -> float | None:
        """When `size` bytes sent now will have arrived; None where they are lost."""
        if self.link.loss and self.chance.random() < self.link.loss:
            return None
        if self.link.rate is None:
            return now + self.link.delay_s
        takes = size * 8 / self.link.rate
        begins = max(now, self.sending.get(source, 0.0))
        # The switch passes bits on as they come, so an idle cable behind it adds no time.
        ends = max(begins, self.receiving.get(target, 0.0)) + takes
        if ends - takes - now > QUEUE_S:
            return None
        self.sending[source] = begins + takes
        self.receiving[target] = ends
        return ends + self.link.delay_s


def carry(hosts: Mapping[bytes, int], wire: Wire) -> None:
    """Carry packets between the hosts' interfaces for ever. Keys are IPv4 addresses as four bytes."""
    files = list(hosts.values())
    # The packets for one host arrive in the order in which they were given a time.
    under_way: dict[int, deque[tuple[float, bytes]]] = {file: deque() for file in files}
    clock = time.monotonic
    while True:
        due = [queue[0][0] for queue in under_way.values() if queue]
        # select and not epoll, which only counts whole milliseconds.
        ready, _, _ = select.select(files, [], [], max(0.0, min(due) - clock()) if due else None)
        for source in ready:
            for _ in range(_TURN):
                try:
                    packet = os.read(source, _LONGEST)
                except BlockingIOError:
                    break
                target = hosts.get(packet[_TARGET]) if packet[_IPV4] >> 4 == 4 else None
                if target is None:
                    continue  # not for any host here: IPv6, multicast
                arrival = wire.arrival(clock(), source, target, len(packet) - _HEADER)
                if arrival is not None:
                    under_way[target].append((arrival, packet))
        now = clock()
        for target, queue in under_way.items():
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # the interface is down: the packet is lost
                    os.write(target, queue.popleft()[1])


def make_interface(namespace: str, whole_packets: bool) -> int:
    """A TUN interface in a namespace, as the file that its packets are read from and written to."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET):
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem), namespace)
    os.close(descriptor)
    # The interface is made in the namespace that we are in now; which one we are in later does not matter.
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    fcntl.ioctl(file, _TUNSETIFF, wanted)
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUM | (0 if whole_packets else _TSO4 | _TSO6))
    return file


def _be_prompt() -> None:
    """A packet that is due must not wait for a rank's time slice, nor for a timer that the kernel rounds."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main(words: list[str]) -> None:
    die_with_parent()
    link = parse_link(words[0])
    # Chunks of 64 KiB are cheaper to carry, but losing one would lose 45 packets at once.
    whole_packets = link.loss_ppm > 0
    hosts = {}
    for word in words[1:]:
        namespace, _, address = word.rpartition("=")
        hosts[ipaddress.IPv4Address(address).packed] = make_interface(namespace, whole_packets)
    _be_prompt()
    print("up", flush=True)
    carry(hosts, Wire(link, random.Random()))


if __name__ == "__main__":
    main(sys.argv[1:])
