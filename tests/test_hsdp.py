"""`fsdp.replicas`: groups of ranks that each divide the whole model, on four ranks, over gloo and through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import strategy_rank as reference
from lockstep.errors import InputError
from lockstep.launch import mpirun
from lockstep.placement import Fsdp, Placement, unused_settings
from lockstep.predict.messages import check_known
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from shm_rank import Session
from support import SHORT, Cli
from test_strategies import ADAM, TORCH, distance, run, same_state, same_tensors, together, weights
from test_verify import ADAM as VERIFIED
from test_verify import Proofs

HSDP = {"replicas": 2}
WRONG = """
import torch.distributed as dist
from lockstep.strategies.fsdp import Fsdp

class Apart(Fsdp):
    def __init__(self, model, placement, device):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        super().__init__(model, placement, device, groups[dist.get_rank() // 2])

class Twice(Fsdp):
    def __init__(self, *given):
        super().__init__(*given)
        self.gradient_scale *= 2
"""


@pytest.fixture(scope="module", params=["gloo", "shm"])
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    backend: str = request.param
    opened = Session(tmp_path_factory.mktemp("hsdp"), 4, hosts="aaaa", backend=backend, timeout=60)
    try:
        yield opened
        assert opened.close() == [0] * 4
    finally:
        opened.kill()


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 3])
def test_equal_to_one_process(four: Session, passes: int) -> None:
    """Gradients of every batch, also where ranks have no sample, and the weights at the end; ranks agree in every bit."""
    found = together(run(four, "train", settings=ADAM, strategy="fsdp", fsdp=HSDP, passes=passes))
    expected = reference.alone(TORCH["adam"])
    for number, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        assert distance(mine, theirs) < 1e-4 * (1 if number == 0 else 10), f"step {number + 1}"
    assert distance(weights(found), list(expected["weights"].values())) < 1e-3


@pytest.mark.slow
def test_each_group_keeps_the_whole_model_in_parts(four: Session) -> None:
    results = run(four, "fsdp_parts", settings=ADAM, replicas=2)
    model = reference.build_model()
    whole = sum(parameter.numel() for parameter in model.parameters())
    for group in (results[:2], results[2:]):
        assert sum(result["kept"] for result in group) == whole
    for result in results:
        assert result["norm"] == 1.0, "of ranks 0 and 1 within each group: sqrt(0² + 1²)"
        same_state(result["state"], results[0]["state"])
        same_state(result["reloaded"], results[0]["state"])
        same_tensors(list(result["loaded"].values()), list(reference.build_model(seed=6).state_dict().values()))


@pytest.mark.parametrize(
    ("ranks", "replicas", "said"),
    [
        (4, 3, "fsdp.replicas=3 does not divide ranks=4: choose fsdp.replicas=2"),
        (12, 5, "fsdp.replicas=5 does not divide ranks=12: choose fsdp.replicas=2 or 3 or 4 or 6"),
        (3, 2, "fsdp.replicas=2 does not divide ranks=3: leave fsdp.replicas out"),
        (4, 4, "fsdp.replicas=4 leaves each of ranks=4 the whole model, as strategy=ddp does: choose fsdp.replicas=2"),
    ],
)
def test_replicas_divide_the_ranks(ranks: int, replicas: int, said: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(Recipe(), Placement(ranks=ranks, strategy="fsdp", fsdp=Fsdp(replicas=replicas)))
    assert str(caught.value) == said


def test_it_is_a_setting_of_fsdp(module_cli: Cli) -> None:
    assert "choose strategy=fsdp fsdp.replicas=2" in module_cli.error("run", "ranks=4", "strategy=hsdp", code=2)
    placement = Placement(ranks=4, strategy="ddp", fsdp=Fsdp(replicas=2))
    assert unused_settings(placement) == ["fsdp.* has no effect with strategy=ddp"]
    with pytest.raises(InputError, match="compile=true does not go with strategy=fsdp"):
        resolve(Recipe(compile=True), Placement(ranks=2, strategy="fsdp"))
    with pytest.raises(InputError, match="cannot be predicted"):
        check_known(Placement(ranks=4, strategy="fsdp", fsdp=Fsdp(replicas=2)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verify_proves_it_on_four_ranks(tmp_path: Path) -> None:
    """Every backend that is here; the run in one process is made once."""
    proofs = Proofs(tmp_path)
    recipe = (*VERIFIED, "optimizer.clip_norm=0.5")
    for backend in ("gloo", "shm", *(["mpi"] if mpirun.library_kind() else [])):
        place = ("ranks=4", "strategy=fsdp", f"backend={backend}", *(["launcher=mpirun"] if backend == "mpi" else []))
        for more in ((), ("fsdp.replicas=2",)):
            assert proofs.wrong(*recipe, where=(*place, *more), which="4 ranks") == {}, (backend, more)
    which = "4 ranks, accumulation 2"
    assert proofs.wrong(*recipe, where=("ranks=4", "strategy=fsdp", "fsdp.replicas=2"), which=which) == {}
    (tmp_path / "wrong.py").write_text(WRONG)
    for name in ("Apart", "Twice"):
        wrong = proofs.wrong(
            *recipe, where=("ranks=4", f"strategy={tmp_path}/wrong.py:{name}", "fsdp.replicas=2"), which="4 ranks"
        )
        assert "gradient against float64" in wrong, "groups that do not exchange, or count twice, are found"


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_placement(module_cli: Cli) -> None:
    """Four ranks in two groups, then two ranks with ddp, and back; beside a run that was never interrupted."""
    words = (*SHORT, "train_limit=240", "optimizer.clip_norm=0.5")
    hsdp = ("ranks=4", "strategy=fsdp", "fsdp.replicas=2")
    whole = module_cli.run(*words, *hsdp, "epochs=3")
    assert whole["ranks_agree"]
    first = module_cli.run(*words, *hsdp, "epochs=1", "--checkpoint-every", "1")
    same = module_cli.run(*words, *hsdp, "epochs=3", "--resume", first["run"])
    assert same["weights_sha256"] == whole["weights_sha256"]
    by_ddp = module_cli.run(
        *words, "ranks=2", "strategy=ddp", "epochs=2", "--resume", first["run"], "--checkpoint-every", "1"
    )
    back = module_cli.run(*words, *hsdp, "epochs=3", "--resume", by_ddp["run"])
    assert back["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-3)
    alone = module_cli.run(*words, "epochs=3")
    assert alone["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-3)


KEPT = """
import torch
from lockstep import models, strategies
from lockstep.measure.memory import bytes_of
from lockstep.placement import Fsdp, Placement
from lockstep.recipe import Recipe
from lockstep.training import optimizers
recipe = Recipe(model="cifar-vgg", data="cifar10")
model = models.build(recipe)
placement = Placement(ranks=ranks, **{**chosen, "fsdp": Fsdp(**chosen.get("fsdp", {}))})
made = strategies.build(placement.strategy, model, placement, torch.device("cpu"))
optimizer = made.optimizer(lambda parameters: optimizers.build(recipe.optimizer, parameters))
made.model(torch.zeros(1, 3, 32, 32)).sum().backward()
made.exchange()
result = [bytes_of(model.parameters()), sum(p.grad.nbytes for p in optimizer.parameters), optimizer.inner.kept_bytes() if hasattr(optimizer, "inner") else optimizer.kept_bytes()]
"""


@pytest.mark.slow
def test_the_bytes_in_the_docs_are_what_a_rank_keeps(tmp_path: Path) -> None:
    """Weights, gradients and optimizer state of the rank that has most, in MB."""
    session = Session(tmp_path, 4, hosts="aaaa", backend="gloo", timeout=60)
    rows = {
        "`ddp`": {"strategy": "ddp"},
        "`ddp` with `zero=true`": {"strategy": "ddp", "zero": True},
        "`fsdp` with `fsdp.replicas=2`": {"strategy": "fsdp", "fsdp": {"replicas": 2}},
        "`fsdp`": {"strategy": "fsdp"},
    }
    lines = []
    try:
        for name, chosen in rows.items():
            found = max(session.run(KEPT, chosen=chosen), key=sum)
            lines.append(f"| {name} | {' | '.join(f'{size / 1e6:.1f}' for size in (*found, sum(found)))} |")
        session.close()
    finally:
        session.kill()
    table = "\n".join(lines)
    assert table in (Path(__file__).parents[1] / "docs/strategies.md").read_text(), f"the table is now\n{table}"
