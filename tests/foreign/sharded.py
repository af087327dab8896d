"""A loop with fully_shard for torchrun: `python sharded.py KIND FAULT START SEED`. Faults are planted in the ranks alone, from a step on."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KIND, FAULT, START, SEED = (sys.argv[1:] + ["plain", "", "1", "0"][len(sys.argv) - 1 :])[:4]
BATCH, STEPS = 16, 8
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
step = 1


def planted(*names):
    return world > 1 and FAULT in names and step >= int(START)


torch.manual_seed(int(SEED) + (rank if FAULT == "seed of rank" else 0))
# 45 rows do not divide by two ranks, and one of 3 has a part of one row; the second layer is larger than a sketch.
net = nn.Sequential(nn.Linear(24, 45), nn.ReLU(), nn.Linear(45, 48), nn.Tanh(), nn.Linear(48, 3))
half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
policy = {"mp_policy": half} if FAULT == "bf16" and world > 1 else {}
shape = (2, world // 2) if world > 2 else (1, world)
mesh = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))} if KIND == "replicas" else {}
for layer in (net[0], net[2]):
    fully_shard(layer, reshard_after_forward=KIND != "whole", **mesh, **policy)
fully_shard(net, **mesh, **policy)
lr = 0.1 * (world if FAULT == "lr scaled" else 1)
if KIND == "adam":
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr / 10)
else:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
generator = torch.Generator().manual_seed(100 + int(SEED))
passes = 2 if KIND == "accumulation" else 1
samples = STEPS * 2 * BATCH * passes
data = TensorDataset(
    torch.randn(samples, 24, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
)
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
loader = DataLoader(data, batch_size=BATCH, sampler=None if FAULT == "no sampler" and world > 1 else sampler)
for number, (a, b) in enumerate(loader, 1):
    last = number % passes == 0
    if planted("wrong label") and rank == 1:
        b = (b + 1) % 3
    if planted("sample twice") and rank == 1:
        a, b = a[[0, *range(len(a) - 1)]], b[[0, *range(len(b) - 1)]]
    net.set_requires_gradient_sync(last or KIND != "accumulation")
    loss = F.cross_entropy(net(a), b) / (1 if planted("not divided on ranks") else passes)
    if planted("loss times ranks"):
        loss = loss * world
    if planted("rank 1 counts for nothing") and rank == 1:
        loss = loss * 0
    loss.backward()
    if not last:
        continue
    if planted("sum"):
        for parameter in net.parameters():
            parameter.grad.to_local().mul_(world)
    if KIND == "clip":
        if planted("clip of a part"):  # every rank by the norm of what it has
            own = [parameter.grad.to_local() for parameter in net.parameters()]
            norm = torch.stack([part.norm() for part in own if part.numel()]).norm()
            for part in own:
                part.mul_(torch.clamp(0.05 / norm, max=1.0))
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    if planted("state forgotten"):
        optimizer.state.clear()
    if planted("an update skipped") and rank == 1:
        for parameter in net.parameters():
            parameter.grad.to_local().zero_()
    if planted("a part 1 % off") and rank == 1:
        net[2].weight.grad.to_local().mul_(1.01)
    if planted("lr of one rank") and rank == 1:
        optimizer.param_groups[0]["lr"] = lr * 1.01
    optimizer.step()
    optimizer.zero_grad()
    if planted("drifts between steps"):
        net[0].weight.data.to_local().mul_(1.001)
    step += 1
