"""A plain solution of loop.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, CLASSES = 16, 4, 4


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(CLASSES, (640,), generator=draw)
    centres = torch.randn(CLASSES, 8, generator=draw) * 2
    return TensorDataset(centres[labels] + torch.randn(640, 8, generator=draw), labels)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = samples()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
