"""Starting ranks on emulated hosts; the hosts themselves are in network.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from lockstep.launch import spawn, torchrun
from lockstep.launch.base import Start
from lockstep.launch.emulated.network import Host, Network
from lockstep.placement import ranks_per_host
from lockstep.process import LINK
from lockstep.run import Spec

# Each emulated network is alone with itself, so all can use the same.
PORT = 29500


def starts(spec: Spec, folder: Path, network: Network) -> list[Start]:
    """One process per rank, or one torchrun per host, each on its emulated host."""
    placement = spec.placement
    if placement.launcher == "torchrun":
        meeting = msgspec.structs.replace(placement, rendezvous=f"{network.hosts[0].address}:{PORT}")
        together = msgspec.structs.replace(spec, placement=meeting)
        return [
            _on(host, start)
            for index, host in enumerate(network.hosts)
            for start in torchrun.starts(together, folder, index)
        ]
    local = ranks_per_host(placement)
    return [
        _on(network.hosts[rank // local], start) for rank, start in enumerate(spawn.starts(spec, folder, host_index=0))
    ]


def _on(host: Host, start: Start) -> Start:
    # Over what the user's shell says: an interface of this machine does not exist on an emulated host.
    interfaces = {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
    link = {} if host.link_process is None else {LINK: str(host.link_process)}
    return replace(start, argv=[*host.prefix, *start.argv], environment=start.environment | interfaces | link)
