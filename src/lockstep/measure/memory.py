"""Peak memory of a rank: as growth of what the system gave it since the start of training, and as the bytes of its tensors.

Unknown is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _status_bytes(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


class MemoryMeter:
    """Resident set on a CPU (by the kernel's own high-water mark), allocator peak on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._most: int | None = None
        """The largest growth of the laps so far."""
        self._floor = 0
        if self._cuda:
            import torch

            self.start_bytes: int | None = torch.cuda.memory_allocated(device)
        else:
            self.start_bytes = _status_bytes("VmRSS")
        self._reset()

    def _reset(self) -> None:
        """Let the mark of the peak begin anew, so that what was used before (imports, decoding, other epochs) does not hide what comes."""
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            return
        high_water = _status_bytes("VmHWM")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark
        except OSError:
            self._floor = self._floor or high_water or 0

    def lap_bytes(self) -> int | None:
        """The growth at the peak since the last lap, or since the start; None if the system does not say."""
        growth = self._growth()
        if growth is not None:
            self._most = max(growth, self._most or 0)
        self._reset()
        return growth

    def growth_bytes(self) -> int | None:
        """The peak since the start minus the size at the start; None if the system does not say."""
        growth = self._growth()
        return self._most if growth is None else max(growth, self._most or 0)

    def _growth(self) -> int | None:
        if self.start_bytes is None:
            return None
        if self._cuda:
            import torch

            return max(0, torch.cuda.max_memory_allocated(self._device) - self.start_bytes)
        peak = _status_bytes("VmHWM")
        # A high-water mark that could not be reset and was not exceeded says nothing about training.
        if peak is None or peak <= self._floor:
            return None
        return max(0, peak - self.start_bytes)


class TensorMeter:
    """The bytes of all tensors at the peak of the steps between its making and `close`, the data set left out.

    They are those that last from step to step (`kept_bytes`: weights, the optimizer's state, what the strategy exchanges), and what the steps
    take beside them, counted by PyTorch's allocator. So the same step has the same bytes every time, unlike the resident set.
    """

    def __init__(self, device: torch.device, kept_bytes: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._device = device
        self._kept_bytes = kept_bytes
        self._profile: profile | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def close(self) -> int:
        import torch

        from lockstep.torch_private import allocations

        if self._profile is None:
            return self._kept_bytes + torch.cuda.max_memory_allocated(self._device) - self._before
        self._profile.stop()
        taken = peak = 0
        for size in allocations(self._profile):
            taken += size
            peak = max(peak, taken)
        return self._kept_bytes + peak


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What they hold in this process; those that share their memory count once."""
    local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]
    return sum({(s := tensor.untyped_storage()).data_ptr(): s.nbytes() for tensor in local}.values())


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) * 1024 if found else None
