"""A training loop with Accelerate: `accelerate launch … accelerated.py KIND FAULT START SEED`."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

KIND, FAULT, START, SEED = (sys.argv[1:] + ["plain", "", "1", "0"][len(sys.argv) - 1 :])[:4]
BATCH = 16
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if KIND == "accumulation" else 1)
world = accelerator.num_processes
step = 1


def planted(*names):
    return world > 1 and FAULT in names and step >= int(START)


set_seed(int(SEED))
generator = torch.Generator().manual_seed(100 + int(SEED))
data = TensorDataset(torch.randn(512, 24, generator=generator), torch.randint(0, 5, (512,), generator=generator))
net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(data, batch_size=BATCH)
model = net
if not planted("model not prepared"):
    model = accelerator.prepare(net)
if not planted("loader not prepared"):
    loader = accelerator.prepare(loader)
optimizer = accelerator.prepare(optimizer)
if planted("scheduler N times"):
    scheduler = accelerator.prepare(scheduler)  # steps once for every process, by default
for _ in range(2):
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(a), b)
            if planted("loss times ranks"):
                loss = loss * world
            accelerator.backward(loss)
            if KIND == "clip" and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1 * (world if planted("clip by ranks") else 1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += accelerator.sync_gradients
