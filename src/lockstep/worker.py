"""What one rank does, top to bottom. Every launcher starts it the same way: `python -m lockstep.worker RUN_DIR`.

It finds its rank in its launcher's environment, reads the recipe from the run folder, and writes what happened there.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from pathlib import Path

from lockstep.errors import InputError, LockstepError, RunFailed
from lockstep.measure.recorder import Recorder, write_failure
from lockstep.parallel.ranks import Rank, detect
from lockstep.process import die_with_parent, pin, redirect_output
from lockstep.run import Run, Spec, write_atomic


def work(run: Run, spec: Spec, rank: Rank) -> None:
    """Data, model, strategy, training, results."""
    import torch

    from lockstep import models
    from lockstep.data import open_data
    from lockstep.data.batches import Batches
    from lockstep.measure.environment import fingerprint
    from lockstep.parallel import group, strategies
    from lockstep.training import capture, checkpoint, optimizers
    from lockstep.training.loop import Trainer
    from lockstep.training.step import Stepper

    recipe, placement, plan = spec.recipe, spec.placement, spec.plan
    assert placement.threads is not None
    torch.set_num_threads(placement.threads)
    device = torch.device("cuda", rank.local_rank) if placement.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory_format = torch.channels_last if placement.memory_format == "channels_last" else torch.contiguous_format
    if rank.is_first:
        write_atomic(run.folder / "environment.json", fingerprint(device))

    root = Path(spec.options.data_root) if spec.options.data_root else None
    data = open_data(recipe.data, root, scratch=run.folder / "data", quiet=True)
    train = Batches(data.train_images, data.train_labels, data, recipe, device, memory_format)
    test = Batches(data.test_images, data.test_labels, data, recipe, device, memory_format)

    model = models.build(recipe)
    models.check_fits(model, recipe, data.shape, data.classes)
    model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    torch.manual_seed(recipe.seed)

    optimizer = optimizers.build(recipe.optimizer, model.parameters())
    # A rank that torchrun has started again goes on from the last whole epoch; DDP needs the weights before it wraps them.
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    position = checkpoint.load(run, model, optimizer) if again else checkpoint.Position()
    recorder = Recorder(run, rank.rank, plan.total_steps, device, rows_kept=position.steps)
    if rank.world > 1:
        group.join(placement, rank, run.folder)
    strategy = strategies.build(placement.strategy, model, placement, device)
    stepper = Stepper(strategy, optimizer, train, plan, rank, recorder.clock, recorder.log)
    if spec.options.capture_gradients:
        capture.gradients(run, rank, model, stepper, train, spec)
    if rank.is_first:
        watcher = {k: v for k, v in run.recorded_status().items() if k in ("supervisor_pid", "host", "job")}
        run.write_status("running", **watcher)
    keep = partial(checkpoint.save, run, model, optimizer) if placement.max_restarts else None
    summary = Trainer(run, spec, rank, model, stepper, train, test, recorder, position, keep).fit()

    if rank.is_first:
        capture.weights(run, model, spec.options)
        write_atomic(run.folder / "summary.json", summary)
        run.write_status("done")
    # Drop the strategy before leaving: DDP's reducer must not outlive the group.
    del strategy, stepper, optimizer
    group.leave()


def main() -> None:
    run = Run.open(Path(sys.argv[1]))
    spec = run.spec()
    rank = detect(spec.placement)
    folder = run.rank_folder(rank.rank)
    die_with_parent()
    redirect_output(folder / "log.txt")
    (folder / "failure.json").unlink(missing_ok=True)  # of an attempt before this one; its log stays
    if spec.placement.pin and spec.placement.device == "cpu":
        # Emulated hosts share this machine's cores, so there the rank's place in the whole world counts.
        place = (rank.rank, rank.world) if spec.placement.emulated else (rank.local_rank, rank.local_world)
        pin(*place, spec.placement.threads or 1)
    try:
        work(run, spec, rank)
    except LockstepError as error:
        _fail(folder, rank, type(error).__name__, str(error), error.exit_code)
    except BaseException as error:
        traceback.print_exc()
        _fail(folder, rank, type(error).__name__, str(error).partition("\n")[0], RunFailed.exit_code, error)


def _fail(folder: Path, rank: Rank, kind: str, message: str, code: int, error: BaseException | None = None) -> None:
    """Leave an account for the supervisor, then end at once: a rank that waits for a dead peer would hang."""
    from lockstep.parallel.group import exit_now, is_peer_loss

    consequence = error is not None and is_peer_loss(error)
    try:
        write_failure(
            folder,
            {
                "rank": rank.rank,
                "kind": kind,
                "message": message,
                "exit_code": code,
                "consequence": consequence,
                "step": _last_step(folder),
            },
        )
    except OSError as problem:
        print(f"could not write the account of the failure: {problem}", file=sys.stderr)
    exit_now(code)


def _last_step(folder: Path) -> int:
    from lockstep.measure.records import read_steps

    return len(read_steps(folder / "steps.bin"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lockstep.worker RUN_DIR")
    try:
        main()
    except InputError as problem:
        print(f"lockstep: {problem}", file=sys.stderr)
        os._exit(problem.exit_code)
