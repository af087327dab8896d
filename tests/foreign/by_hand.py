"""A training loop that exchanges gradients by hand: `python by_hand.py KIND FAULT START SEED`. The last batch is uneven and weighed rightly."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

KIND, FAULT, START, SEED = (sys.argv[1:] + ["plain", "", "1", "0"][len(sys.argv) - 1 :])[:4]
GLOBAL, STEPS = 32, 8
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
step = 1


def planted(*names):
    return world > 1 and FAULT in names and step >= int(START)


class Centred(nn.Module):
    """Subtracts a running mean of all samples, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x):
        return x - self.mean

    def follow(self, x):
        """All ranks have to see the same mean, so it is taken over the global batch."""
        total, count = x.sum(0), torch.tensor(float(len(x)))
        if not planted("buffers"):
            dist.all_reduce(total)
            dist.all_reduce(count)
        self.mean.mul_(0.9).add_(total / count, alpha=0.1)


torch.manual_seed(int(SEED) + (rank if FAULT == "seed of rank" else 0))
centred = Centred()
net = nn.Sequential(centred, nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 5))
generator = torch.Generator().manual_seed(100 + int(SEED))
samples = 4 * GLOBAL - 11
x, y = torch.randn(samples, 24, generator=generator), torch.randint(0, 5, (samples,), generator=generator)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
parameters = list(net.parameters())
before = None


def exchange():
    global before
    gradients = parameters[:-1] if planted("parameter left out") else parameters
    if planted("no exchange"):
        return
    for number, parameter in enumerate(gradients):
        gradient = parameter.grad
        if planted("bf16", "fp16"):
            gradient = gradient.to(torch.bfloat16 if FAULT == "bf16" else torch.float16)
        if planted("one share 1 % off") and rank == 1:
            gradient.mul_(1.01)
        if planted("rank 0's gradient"):
            dist.broadcast(gradient, 0)
        else:
            dist.all_reduce(gradient, op=dist.ReduceOp.MAX if planted("maximum") else dist.ReduceOp.SUM)
        parameter.grad = gradient.to(torch.float32)
        if planted("divided by ranks"):
            parameter.grad /= world
        if planted("two per mille"):
            parameter.grad *= 1.002
        if planted("one entry 1 % off") and number == 0:
            entries = parameter.grad.view(-1)
            entries[entries.abs().argmax()] *= 1.01
        if planted("one rank 1 % off") and rank == 1:
            parameter.grad *= 1.01
        if planted("not a number") and number == 0:
            parameter.grad.view(-1)[0] = float("nan")
    now = [parameter.grad.clone() for parameter in parameters]
    if planted("stale bucket") and before is not None:
        parameters[0].grad.copy_(before[0])
    before = now


while step <= STEPS:
    for first in range(0, samples, GLOBAL):
        batch, labels = x[first : first + GLOBAL], y[first : first + GLOBAL]
        cut = [len(batch) * r // world for r in range(world + 1)]
        low, high = cut[rank], cut[rank + 1]
        if planted("sample of another rank") and rank == 1:
            low, high = low - 1, high - 1
        if planted("a sample missing") and rank == 1:
            low += 1
        a, b = batch[low:high], labels[low:high]
        if planted("inputs scaled") and rank == 1:
            a = a * 1.002
        count = len(batch)
        if planted("last batch by rank"):
            count = len(a) * world
        if planted("divided by the local batch"):
            count = len(a)
        optimizer.zero_grad()
        (F.cross_entropy(net(a), b, reduction="sum") / count).backward()
        if planted("clip before the exchange"):
            nn.utils.clip_grad_norm_(parameters, 0.1)
            exchange()
        else:
            exchange()
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if planted("decay per rank") and step == int(START):
            optimizer.param_groups[0]["weight_decay"] *= world
        optimizer.step()
        centred.follow(a)
        step += 1
