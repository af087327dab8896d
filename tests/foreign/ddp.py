"""A training loop for torchrun as people write it: `python ddp.py KIND FAULT START SEED`. Faults are planted in the ranks alone, from a step on."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KIND, FAULT, START, SEED = (sys.argv[1:] + ["plain", "", "1", "0"][len(sys.argv) - 1 :])[:4]
BATCH, STEPS, EPOCHS = 16, 8, 2
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
step = 1


def planted(*names):
    return world > 1 and FAULT in names and step >= int(START)


torch.manual_seed(int(SEED) + (rank if FAULT == "seed of rank" else 0))
if KIND == "norm":
    net = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
elif KIND == "dropout":
    net = nn.Sequential(nn.Linear(24, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 5))
else:
    net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
generator = torch.Generator().manual_seed(100 + int(SEED))
samples = STEPS // EPOCHS * 2 * BATCH - (14 if KIND == "uneven" else 7 if FAULT == "padding" else 0)
if KIND == "accumulation":
    samples *= 2
x, y = torch.randn(samples, 24, generator=generator), torch.randint(0, 5, (samples,), generator=generator)
noise = 0.1 * torch.randn(samples, 24, generator=generator)

if FAULT == "parameter left out" and world > 1:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
model = torch.compile(net, backend="aot_eager") if KIND == "compiled" else net
model = DistributedDataParallel(model, broadcast_buffers=FAULT != "buffers")

held = {}


def hook(state, bucket):
    """What a communication hook of one's own can do wrong."""
    mine = bucket.buffer().clone()
    if planted("rank 0's gradient"):
        dist.broadcast(mine, 0)
        return torch.futures.collect_all([]).then(lambda _: mine)
    if planted("bf16", "fp16"):
        rounded = mine.to(torch.bfloat16 if FAULT == "bf16" else torch.float16)
        dist.all_reduce(rounded)
        return torch.futures.collect_all([]).then(lambda _: rounded.to(torch.float32) / world)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX if planted("maximum") else dist.ReduceOp.SUM)
    mine /= 1 if planted("sum") else world**2 if planted("divided twice") else world
    if planted("two per mille"):
        mine *= 1.002
    before, held[bucket.index()] = held.get(bucket.index(), mine), mine.clone()
    found = before if planted("stale bucket") else mine
    return torch.futures.collect_all([]).then(lambda _: found)


if KIND in ("plain", "clip") and FAULT in (
    "rank 0's gradient", "bf16", "fp16", "maximum", "sum", "divided twice", "two per mille", "stale bucket"
):  # fmt: skip
    model.register_comm_hook(None, hook)
elif KIND == "hook":
    model.register_comm_hook(None, default_hooks.allreduce_hook)

lr = 0.1 * (world if FAULT == "lr scaled" and START == "1" else 1)
if KIND == "optimizers":
    optimizers = [torch.optim.SGD(net[:3].parameters(), lr=lr, momentum=0.9), torch.optim.AdamW(net[4].parameters())]
elif KIND in ("clip", "accumulation", "amp-adam"):
    optimizers = [torch.optim.Adam(net.parameters(), lr=lr / 10)]
else:
    optimizers = [torch.optim.SGD(net.parameters(), lr=lr, momentum=0.95 if planted("momentum") else 0.9)]
if FAULT in ("updates too large", "no update"):  # what an optimizer of one's own can do wrong

    def wrong(*_):
        with torch.no_grad():
            if planted("updates too large"):
                net[2].weight.add_(0.5 * (net[2].weight - held["weight"]))
            if planted("no update"):
                net[2].weight.copy_(held["weight"])

    optimizers[0].register_step_pre_hook(lambda *_: held.update(weight=net[2].weight.detach().clone()))
    optimizers[0].register_step_post_hook(wrong)
schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]

data = TensorDataset(x, y, torch.arange(samples))
own_seed = rank if planted("order of rank") else 0
sampler = DistributedSampler(data, seed=own_seed, num_replicas=world, rank=rank)
if KIND == "uneven":  # the script knows its global batch; the last one is of 18 samples: 13 and 5
    size = 2 * BATCH
    cuts = [[i, i + size // world, i + size] for i in range(0, samples - size + 1, size)]
    cuts.append([samples - samples % size, samples - 5 if world > 1 else samples, samples])
    loader = [(x[cut[rank] : cut[rank + 1]], y[cut[rank] : cut[rank + 1]], None) for cut in cuts]
elif FAULT == "no sampler" and world > 1:
    loader = DataLoader(data, batch_size=BATCH)
else:
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

passes = 2 if KIND == "accumulation" else 1
for epoch in range(EPOCHS):
    if FAULT != "set_epoch":
        sampler.set_epoch(epoch)
    for number, (a, b, index) in enumerate(loader, 1):
        last = number % passes == 0
        if planted("wrong label") and rank == 1:
            b = (b + 1) % 5
        if planted("sample twice") and rank == 1:
            a, b = a[[0, *range(len(a) - 1)]], b[[0, *range(len(b) - 1)]]
        if KIND == "augmented":
            own_noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(rank + 10 * step))
            a = a + (0.1 * own_noise if planted("augmentation of rank") else noise[index])
        if planted("order of rank") and int(START) > 1:
            pick = torch.randperm(samples, generator=torch.Generator().manual_seed(rank + step))[: len(a)]
            a, b = x[pick], y[pick]
        silent = not last if not planted("exchanges the first pass alone") else last
        with model.no_sync() if silent or planted("no_sync left on") else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16) if KIND.startswith("amp") else nullcontext():
                out = model(a)
                loss = F.cross_entropy(out, b, reduction="sum" if FAULT == "loss summed" else "mean")
            if KIND == "uneven" and not planted("last batch by rank"):
                count = torch.tensor(float(len(b)))
                dist.all_reduce(count)
                loss = loss * len(b) * world / count
            if planted("loss times ranks"):
                loss = loss * world
            if planted("loss divided by ranks"):
                loss = loss / world
            if planted("rank 1 counts for nothing") and rank == 1:
                loss = loss * 0
            (loss / (passes if FAULT != "not divided" and not planted("not divided on ranks") else 1)).backward()
        if not last:
            continue
        if KIND == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (world if planted("clip by ranks") else 1))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            if planted("lr scaled") and int(START) == step > 1:
                optimizer.param_groups[0]["lr"] *= world
            if planted("momentum") and int(START) == step > 1:
                optimizer.param_groups[0]["momentum"] = 0.95
            if planted("state forgotten"):
                optimizer.state.clear()
            if planted("an update skipped") and rank == 1:
                for p in net.parameters():
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            for _ in range(world if planted("scheduler N times") else 1):
                scheduler.step()
            optimizer.zero_grad()
        if planted("drifts between steps"):
            with torch.no_grad():
                net[0].weight.mul_(1.001)
        step += 1
