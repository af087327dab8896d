"""What every peer shares: the data, the net, the optimizer, the clock, and the line of JSON that comes out.

A peer is a function `train(images, labels, options) -> Epoch` that trains document D's net for one epoch in
its own way; `main` reads the command line, lets it warm up on another net, then times the epoch.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 32
LEARNING_RATE = 5e-4
WEIGHT_DECAY = 5e-4
SEED = 123
WARM_UP_STEPS = 50

Images = np.ndarray  # uint8, N x 1 x 28 x 28
Labels = np.ndarray  # uint8, N


@dataclass(frozen=True)
class Options:
    """The choices that a peer leaves open, so that a reader can see how much each one matters."""

    fused_adam: bool = False
    channels_last: bool = False
    per_sample_transforms: bool = False


@dataclass(frozen=True)
class Epoch:
    """What one epoch's training took and gave: the training loop alone, nothing around it."""

    seconds: float
    cpu_seconds: float
    loss: float
    accuracy: float


class Stopwatch:
    """Wall and CPU time over the same span; CPU time shows up a contender that uses a second core."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def start(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = time.process_time() - self._cpu

    def __enter__(self) -> Stopwatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def build_net(options: Options) -> nn.Module:
    """Document D's net, 4,266 parameters; the seed is set right before, so everyone starts from the same."""
    torch.manual_seed(SEED)
    # The tuned variants pool first, as Lockstep's own net does: the same bits for a quarter of the ReLU's work.
    after = (nn.MaxPool2d(2), nn.ReLU()) if options.channels_last else (nn.ReLU(), nn.MaxPool2d(2))
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        *after,
        nn.Conv2d(4, 8, 3, padding=1),
        *after,
        nn.Flatten(),
        nn.Linear(392, 10),
    )
    return net.to(memory_format=torch.channels_last) if options.channels_last else net


def build_adam(net: nn.Module, options: Options) -> torch.optim.Adam:
    """Adam as D has it. `fused` is left at PyTorch's default unless a variant asks for it."""
    return torch.optim.Adam(
        net.parameters(),
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True if options.fused_adam else None,
    )


def normalised(images: Images) -> Tensor:
    """All images as float tensors in [-1, 1], made once and kept in memory."""
    return torch.from_numpy(np.ascontiguousarray(images)).float().div_(255).sub_(0.5).div_(0.5)


def to_tensor(image: Image.Image) -> Tensor:
    """What a ToTensor transform does to a grey picture: bytes, H x W -> float in [0, 1], C x H x W."""
    pixels = torch.from_numpy(np.array(image, np.uint8, copy=True))
    return pixels.view(image.height, image.width, 1).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class Normalize:
    """What a Normalize transform does; mean and deviation are made once, which favours the peer a little."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image: Tensor) -> Tensor:
        return image.clone().sub_(self.mean).div_(self.std)


class Pictures(Dataset[tuple[Tensor, int]]):
    """A data set as the reports have it: a sample is made and transformed at the moment it is asked for."""

    def __init__(self, images: Images, labels: Labels) -> None:
        self.images = images
        self.labels = labels
        self.normalize = Normalize((0.5,), (0.5,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = Image.fromarray(self.images[index, 0])
        return self.normalize(to_tensor(picture)), int(self.labels[index])


def build_loader(images: Images, labels: Labels, options: Options) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches in the data's own order, as in D; from ready tensors unless a variant asks otherwise."""
    if options.per_sample_transforms:
        return DataLoader(Pictures(images, labels), batch_size=BATCH, shuffle=False, num_workers=0)
    tensors = TensorDataset(normalised(images), torch.from_numpy(labels.astype(np.int64)))
    return DataLoader(tensors, batch_size=BATCH, shuffle=False, num_workers=0)


def read_data(folder: Path, samples: int | None) -> tuple[Images, Labels]:
    """The first `samples` training images, copied into memory: the disk is no part of the measurement."""
    images = np.load(folder / "train-images.npy", mmap_mode="r")[:samples]
    labels = np.load(folder / "train-labels.npy", mmap_mode="r")[:samples]
    if images.shape[1:] != (1, 28, 28) or images.dtype != np.uint8:
        raise SystemExit(f"train-images.npy holds {images.dtype} {images.shape}; wanted uint8 N x 1 x 28 x 28")
    return np.array(images), np.array(labels)


TrainEpoch = Callable[[Images, Labels, Options], Epoch]


def main(train: TrainEpoch, packages: Sequence[str] = ()) -> None:
    """Warm up, train the epoch, print one line of JSON; it names the versions of `packages`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="folder with train-images.npy and train-labels.npy")
    parser.add_argument("--samples", type=int, help="train on the first N images only")
    parser.add_argument("--fused", action="store_true", help="Adam(fused=True)")
    parser.add_argument("--channels-last", action="store_true", help="the net in channels-last memory")
    parser.add_argument("--transforms", action="store_true", help="per-sample transforms in place of ready tensors")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    options = Options(arguments.fused, arguments.channels_last, arguments.transforms)
    images, labels = read_data(arguments.folder, arguments.samples)
    train(images[: WARM_UP_STEPS * BATCH], labels[: WARM_UP_STEPS * BATCH], options)
    epoch = train(images, labels, options)
    document = {
        "images": len(images),
        "seconds": epoch.seconds,
        "cpu_seconds": epoch.cpu_seconds,
        "loss": epoch.loss,
        "accuracy": epoch.accuracy,
        "versions": {name: version(name) for name in ("torch", "numpy", *packages)},
        "python": platform.python_version(),
    }
    print(json.dumps(document), flush=True)
