"""What one rank writes down for `lockstep verify`, step by step (docs/verify.md).

The run in one process is the *reference*: before each judged step it saves the whole state, and beside its own float32 step
it computes the step's true gradient in float64 (truth.py). A run on another placement loads that state before the step, takes the step
through its normal path, and writes down what came of it. So rounding of one step never reaches the next. Nothing is judged here:
`lockstep.verify.judge` compares what the folders hold.

    proof/state-00000007.pt       reference: weights, buffers, optimizer, loss scale before step 7 (from 0)
    proof/true-00000007.pt        reference: the gradient and the loss in float64, and what perturbations of rounding size do to them
    proof/step-00000007.pt        rank 0: the exchanged gradient, and weights and optimizer after the update
    proof/own-00000007-0001.pt    rank 1: the gradient of its own share, computed once more without the strategy
    proof/rank-0001.jsonl         every rank, every step: samples, learning rate, digests
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import Batch, Batches
from lockstep.data.inputs import Inputs, leaves, mapped
from lockstep.models import layers
from lockstep.models.calling import call
from lockstep.recipe import Regularize
from lockstep.run import Proof, append_line
from lockstep.torch_private import AnyBatchNorm
from lockstep.training.context import Context
from lockstep.training.evaluate import Evaluation
from lockstep.training.recipe_step import TrainState
from lockstep.training.state import digest, whole_state
from lockstep.training.truth import Gradient, Pass, in_double, true_evaluation, true_step

FOLDER = "proof"
# Every step is judged where that costs at most this; else as many as do, spread over the run.
BUDGET_BYTES, BUDGET_SECONDS = 1 << 30, 20.0


class Witness:
    """Follows one rank's steps and evaluations."""

    def __init__(self, context: Context, state: TrainState) -> None:
        run, spec, rank, model = context.run, context.spec, context.rank, state.model
        assert spec.options.proof is not None
        self._proof: Proof = spec.options.proof
        self._spec, self._rank, self._model, self._strategy = spec, rank, model, state.strategy
        self._optimizer, self._precision, self._loss = state.optimizer, state.precision, state.loss
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._folder = run.folder / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._source = Path(self._proof.reference) / FOLDER if self._proof.reference else None
        self._stride = 1
        self._expected: str | None = None
        self._row: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._passes: list[Pass] = []
        self._before: dict[str, Any] | None = None
        self._judge: nn.Module | None = None
        norm = any(isinstance(layer, AnyBatchNorm) for layer in model.modules())
        append_line(self._folder / f"rank-{rank.rank:04d}.jsonl", {"batch_norm": norm})

    @property
    def _is_judge(self) -> bool:
        return self._proof.keep and self._source is None

    # What the training step calls

    def before(self, step: int) -> None:
        """Before step 0, 1, 2, …: start where the reference did."""
        self._row, self._kept, self._passes = {"step": step, "samples": []}, {}, []
        self._row["undisturbed"] = self._expected in (None, self._weights_digest())
        self._before = self._judge = None
        path = self._path("state", step)
        if self._source is not None:
            if path.exists():
                self._kept["buffers"] = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
                self._before = _read(path)
                self._load(self._before)
        elif self._is_judge and self._is_due(step):
            self._before = self._state()
            torch.save(self._before, path)
            self._judge = copy.deepcopy(self._model)
        self._generator = torch.get_rng_state()

    def saw(self, batch: Batch, real: int, count: float) -> None:
        """A forward pass has this batch."""
        self._row["samples"] += _fingerprints(mapped(batch.images, lambda one: one[:real]), batch.labels[:real])
        if self._before is not None and self._proof.keep:
            self._passes.append(Pass(batch, real, count))

    def exchanged(self, clip_norm: float | None, regularize: Regularize) -> None:
        """The exchange is over, and the optimizer has not begun; what it will be given."""
        optimizer, scale = self._optimizer, self._precision.scale
        self._row |= {
            "lr": optimizer.lr,
            "momentum": optimizer.momentum,
            "clip_norm": clip_norm,
            "l1": regularize.l1,
            "l2": regularize.l2,
            "scale": float(scale.value) if scale else 1.0,
        }
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in optimizer.parameters]
        gradients = [None if g is None else self._strategy.whole(index, g) for index, g in enumerate(gradients)]
        self._kept["gradient"] = found = dict(zip(self._names, gradients, strict=True))
        self._row["gradient"] = digest({name: g for name, g in found.items() if g is not None})

    def after(self) -> None:
        """The step is over."""
        begin, step = perf_counter(), self._row["step"]
        self._expected = self._row["weights"] = self._weights_digest()
        if self._before is not None:
            after = self._state()
            self._row["optimizer"] = digest(
                {f"{k} {i}": t for k, ts in after["optimizer"].items() for i, t in enumerate(ts)}
            )
            if self._proof.keep:
                if self._rank.is_first:
                    torch.save({**self._kept, **after}, self._path("step", step, self._folder))
                if self._judge is not None:
                    self._write_truth(step, begin)
                if self._rank.world > 1 and not self._strategy.divides_weights:
                    self._write_own(step, after)
        append_line(self._folder / f"rank-{self._rank.rank:04d}.jsonl", self._row)

    # What the evaluation calls

    def before_evaluation(self, epoch: int, test: Batches) -> None:
        """Evaluate the reference's weights, so that results can be compared as numbers."""
        self._row = {"epoch": epoch, "samples": []}
        path = self._path("evaluation", epoch)
        if self._source is not None:
            self._load(_read(path))
        elif self._proof.keep:
            samples, batch = self._spec.plan.test_samples, self._spec.placement.eval_batch
            truth = true_evaluation(self._model, test, samples, batch, self._precision, self._spec.recipe, self._loss)
            torch.save({**self._state(), **truth}, path)
        self._expected = self._weights_digest()

    def saw_test(self, images: Inputs, labels: Tensor) -> None:
        self._row["samples"] += _fingerprints(images, labels)

    def evaluated(self, test: Evaluation) -> None:
        self._row |= {"loss": test.loss, "measures": test.measures, "count": test.samples}
        append_line(self._folder / f"rank-{self._rank.rank:04d}.jsonl", self._row)

    # The state

    def _state(self) -> dict[str, Any]:
        """All that a step starts from. Collective where a strategy has divided it."""
        scale = self._precision.scale
        state = {
            "model": whole_state(self._model),
            "optimizer": self._optimizer.state(),
            "scale": scale.state() if scale else {},
        }
        return dict(_cloned(state))

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        state = _cloned(state)  # an optimizer may keep the tensors it is given
        self._strategy.load_weights(state["model"])
        self._optimizer.load_state(state["optimizer"])
        if self._precision.scale and state["scale"]:
            self._precision.scale.load_state(state["scale"])

    def _weights_digest(self) -> str:
        """Of what the optimizer moves. Buffers are compared apart: some change between steps by design."""
        state = whole_state(self._model)
        return digest({name: state[name] for name in self._names})

    def _path(self, kind: str, step: int, folder: Path | None = None) -> Path:
        return (folder or self._source or self._folder) / f"{kind}-{step:08d}.pt"

    def _is_due(self, step: int) -> bool:
        plan = self._spec.plan
        closing = (step + 1) % plan.steps_per_epoch == 0 or step + 1 == plan.total_steps
        return step % self._stride == 0 or closing

    # What is computed beside the step

    def _write_own(self, step: int, after: dict[str, Any]) -> None:
        """The gradient of this rank's share by the plain model: no wrapper, no hook, no exchange of gradients."""
        assert self._before is not None
        generator, parameters = torch.get_rng_state(), [p for p in self._model.parameters() if p.requires_grad]
        scale = self._precision.scale
        self._strategy.load_weights(self._before["model"])
        torch.set_rng_state(self._generator)
        sums = [torch.zeros_like(_real(p), dtype=torch.float64) for p in parameters]
        sizes = [torch.zeros_like(total) for total in sums]
        # The strategy's own factor is multiplied in and taken out again: it need not be a power of two, and the passes are to
        # round as they did in the step.
        factor = self._strategy.gradient_scale * (self._before["scale"]["scale"].item() if scale else 1.0)
        for each in self._passes:
            layers.bind(each.batch.keys, each.real)
            with self._precision.context():
                scores = self._precision.scores(call(self._model, self._precision.images(each.batch.images)))
                loss = self._loss(scores, each.batch)
            scaled = self._strategy.gradient_scale / each.count if each.real and each.count else 0.0
            weight = torch.full((), scaled, dtype=loss.dtype)
            if scale:
                weight = weight * self._before["scale"]["scale"]
            found = torch.autograd.grad(loss * weight, parameters, allow_unused=True)
            for total, size, gradient in zip(sums, sizes, found, strict=True):
                if gradient is not None:
                    total += _real(gradient).double() / factor
                    size += _real(gradient).double().abs() / factor
        self._strategy.load_weights(after["model"])
        torch.set_rng_state(generator)
        content = {
            "gradient": dict(zip(self._names, sums, strict=True)),
            "size": {name: size.float() for name, size in zip(self._names, sizes, strict=True)},
            "passes": len(self._passes),
        }
        torch.save(content, self._folder / f"own-{step:08d}-{self._rank.rank:04d}.pt")

    def _write_truth(self, step: int, begin: float) -> None:
        assert self._judge is not None
        precision, gradient = (
            self._spec.recipe.precision,
            Gradient(self._names, self._passes, self._loss, self._generator),
        )
        torch.save(true_step(in_double(self._judge), gradient, precision, step), self._path("true", step))
        if step == 0:
            self._choose_stride(perf_counter() - begin)

    def _choose_stride(self, seconds: float) -> None:
        """From what the first judged step cost: its files, and the time beside the step."""
        size = sum(path.stat().st_size for path in self._folder.glob("*-00000000.pt"))
        # Every placement writes about as much again.
        cost = max(3 * size / BUDGET_BYTES, seconds / BUDGET_SECONDS)
        self._stride = max(1, round(self._spec.plan.total_steps * cost + 0.5))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _real(tensor: Tensor) -> Tensor:
    """Dense, and complex numbers as pairs of real ones."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _cloned(content: Any) -> Any:
    if isinstance(content, Tensor):
        return content.detach().clone()
    if isinstance(content, dict):
        return {key: _cloned(value) for key, value in content.items()}
    return [_cloned(value) for value in content] if isinstance(content, list) else content


def _fingerprints(images: Inputs, labels: Tensor) -> list[str]:
    """One for each sample: of the very bytes that the model gets, after augmentation, and of its targets."""
    rows = [_bytes_of_each(tensor) for tensor in (*leaves(images), labels)]
    return [hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest() for parts in zip(*rows, strict=True)]


def _bytes_of_each(samples: Tensor) -> list[bytes]:
    return [row.tobytes() for row in samples.detach().cpu().contiguous().numpy()]
