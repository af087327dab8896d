"""Checkpoints: all that is needed to go on as if nothing had happened. Written whole or not at all, loaded without unpickling.

    checkpoints/step-00000045.pt      tensors and plain values, read with weights_only=True
    checkpoints/step-00000045.json    its SHA-256 and what it is; written last: without it the other file does not count
    checkpoints/best.pt, best.json    the same file as the best epoch's, under a name that is never deleted

The last few are kept. One that cannot be read is passed over for the one before it, with a warning that names it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.files import TEMPORARY, replacing
from lockstep.recipe import NonNegative, Recipe
from lockstep.run import CHECKPOINTS, Run, read_json, write_atomic, writing
from lockstep.training.progress import Sums, Totals
from lockstep.training.stopping import Standing

FORMAT = 3
BEST = "best"


class Position(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a run is: its step, and what was summed up until there."""

    step: NonNegative = 0
    """Optimizer steps that were taken. `epoch, offset = divmod(step, plan.steps_per_epoch)`: nothing else says where it is."""
    sums: Sums = msgspec.field(default_factory=Sums)
    """Of the epoch under way, over all ranks."""
    totals: Totals = msgspec.field(default_factory=Totals)
    """Of the epochs before it."""


class Checkpoint(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is kept. Lists have one entry for each rank, or a single one for all of them."""

    recipe: Recipe
    position: Position
    model: dict[str, Tensor]
    """Weights and buffers; where ranks differ, the mean of theirs."""
    ranks: list[dict[str, Tensor]] = []
    """Each rank's own weights or buffers, where ranks differ."""
    optimizers: list[dict[str, list[Tensor]]]
    scales: list[dict[str, Tensor]]
    """fp16's loss scale."""
    strategy: dict[str, Tensor]
    generators: list[Tensor]
    stopping: Standing
    best_weights: dict[str, Tensor]
    path: str = ""
    """The file it was read from."""

    @property
    def run(self) -> Path:
        """The run folder that it belongs to."""
        return Path(self.path).parents[1]


class Keeper:
    """Writes checkpoints into a run folder and deletes old ones."""

    def __init__(self, run: Run, keep: int) -> None:
        self._run, self._keep = run, keep
        self._folder = run.folder / CHECKPOINTS

    def save(self, checkpoint: Checkpoint, about: dict[str, Any], best: bool) -> None:
        """One rank calls it."""
        step = checkpoint.position.step
        name = f"step-{step:08d}"
        with writing(self._run.folder):
            self._folder.mkdir(exist_ok=True)
            for unfinished in self._folder.glob(TEMPORARY):  # of a run that was killed while it wrote
                unfinished.unlink()
            digest = save_whole(self._folder / f"{name}.pt", {"format": FORMAT, **_plain(checkpoint)})
            about = {"format": FORMAT, "sha256": digest, "steps": step, **about}
            write_atomic(self._folder / f"{name}.json", about)
            if best:
                self._link_best(name, about)
            for old in checkpoints_in(self._folder)[self._keep :]:
                (self._folder / f"{old}.json").unlink(missing_ok=True)
                (self._folder / f"{old}.pt").unlink(missing_ok=True)

    def _link_best(self, name: str, about: dict[str, Any]) -> None:
        with replacing(self._folder / f"{BEST}.pt", durable=False) as temporary:
            os.link(self._folder / f"{name}.pt", temporary)
            (self._folder / f"{BEST}.json").unlink(missing_ok=True)
        write_atomic(self._folder / f"{BEST}.json", about)


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the whole ones, newest first."""
    return sorted((path.stem for path in folder.glob("step-*.json")), reverse=True)


def save_whole(path: Path, content: Any) -> str:
    """A file of tensors, whole or not at all; returns its SHA-256."""
    with replacing(path) as temporary, temporary.open("w+b") as file:
        writer = _Writer(file)
        try:
            torch.save(content, writer)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise writer.error or error from None  # torch says "unexpected pos" where a write failed, and not why
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_weights(run: Run, state: dict[str, Tensor]) -> None:
    """The trained weights, whole or not at all."""
    with writing(run.folder):
        save_whole(run.folder / "model.pt", {name: tensor.cpu().contiguous() for name, tensor in state.items()})


class _Writer:
    """A file that remembers the error of a write, which torch loses."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def load(run: Path, warn: Callable[[str], None] | None = None) -> Checkpoint:
    """The newest checkpoint of a run folder that is whole and ours."""
    warn = warn or (lambda text: print(f"warning: {text}", file=sys.stderr))
    folder, problems = run / CHECKPOINTS, []
    for name in checkpoints_in(folder):
        path = folder / f"{name}.pt"
        try:
            return _read(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
            warn(f"checkpoint {path} cannot be used ({error}): taking the one before it")
    reason = f": {problems[0]}" if problems else " (it was run without --checkpoint-every)"
    raise InputError(f"run {run} has no checkpoint that can be used{reason}")


def _read(path: Path) -> Checkpoint:
    about = read_json(path.with_suffix(".json")) or {}
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about.get("sha256"):
            raise ValueError("its contents are not those that were written")
        file.seek(0)
        try:
            content: Any = torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # torch raises many kinds for files that are not its own
            raise ValueError(str(error).partition("\n")[0][:200] or type(error).__name__) from None
    if not isinstance(content, dict) or content.get("format") not in (1, 2, FORMAT) or "position" not in content:
        raise ValueError("it was not written by this version of Lockstep")
    try:
        if content["format"] == 1:
            content = _from_version_1(content)
        if content["format"] < FORMAT:
            content |= {"optimizers": [_with_torch_names(state) for state in content["optimizers"]]}
        return _checked(content, path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is damaged: {str(error).partition(chr(10))[0][:200]}") from None


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    """Tensors and plain values, as torch.load takes them with weights_only=True."""
    content: Any = msgspec.to_builtins(checkpoint, builtin_types=(Tensor,), enc_hook=lambda value: value)
    del content["path"]
    return dict(content)


def _checked(content: dict[str, Any], path: Path) -> Checkpoint:
    """Every field has the type that it is declared with; what does not is named."""
    rest = {key: value for key, value in content.items() if key != "format"}
    for field in msgspec.structs.fields(Checkpoint):
        try:
            msgspec.convert(rest.get(field.name, field.default), field.type, dec_hook=_instance)
        except AttributeError:  # msgspec takes a tensor for an object and asks it for keys
            raise ValueError(f"Unexpected `Tensor` - at `$.{field.name}`") from None
        except msgspec.ValidationError:
            pass  # said below, with the whole path to it
    return msgspec.convert({**rest, "path": str(path)}, Checkpoint, dec_hook=_instance)


def _instance(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
    return value


def _from_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """Version 0.1 counted epochs and visited samples beside the steps. The steps alone say where it was."""
    position = content["position"]
    rest = {key: value for key, value in content.items() if key not in ("position", "scale")}
    return rest | {
        "position": {"step": position["steps"], "sums": position["partial"], "totals": position["totals"]},
        "scales": [content["scale"]] if content["scale"] else [],
    }


def _with_torch_names(state: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Before format 3 an optimizer's state had names of our own; now it has those of `torch.optim`."""
    squares = "exp_avg_sq" if "means" in state else "square_avg"
    names = {"means": "exp_avg", "squares": squares, "speeds": "momentum_buffer"}
    return {names.get(key, key): tensors for key, tensors in state.items()}
