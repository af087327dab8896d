"""What "auto" comes to: in one place, with its reason, and the same for every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep import probe, resolve
from lockstep.backends.costs import store
from lockstep.backends.costs.cells import Cell
from lockstep.errors import InputError
from lockstep.launch import specify
from lockstep.placement import Ddp, Placement
from lockstep.predict.here import as_asked, here
from lockstep.recipe import Recipe, Regularize
from lockstep.run import Options, Probe, Run, Spec
from lockstep.settings import load
from lockstep.study.file import read
from lockstep.study.plan import plan
from lockstep.verify import prove
from support import Cli

DECIDED = ["device", "backend", "launcher", "strategy", "threads", "memory_format"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache" / "data"))
    return tmp_path


def measured(**microseconds: float) -> None:
    """What `lockstep comms` would have kept: the time of each backend for the gradients of the MNIST net."""
    store.save(
        [
            Cell(
                backend=name,
                device="cpu",
                ranks=2,
                collective="all_reduce",
                bytes=17_064,
                message_bytes=17_064,
                n=9,
                median_us=median,
                time=1.8e9,
            )
            for name, median in microseconds.items()
        ]
    )


@pytest.mark.parametrize("fastest", ["gloo", "shm"])
@pytest.mark.parametrize("words", [[], ["launcher=torchrun"], ["hosts=emulated:2"]], ids=str)
def test_the_same_words_are_the_same_placement_everywhere(
    cache: Path, words: list[str], fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(**{"gloo": 200.0, "shm": 100.0, fastest: 10.0})
    words = ["data=embedded", "ranks=2", "global_batch=48", *words]
    recipe, placement = load([], words)
    run = specify(recipe, placement, runs=cache)[1]
    assert run.placement.backend == ("gloo" if run.placement.hosts > 1 else fastest)

    proven = prove.plan(recipe, placement, cache, None)
    assert proven.placement == run.placement
    assert prove.placements(proven.recipe, proven.placement)["2 ranks"] == run.placement

    file = cache / "study.toml"
    where = "".join(f'{word.partition("=")[0]} = "{word.partition("=")[2]}"\n' for word in words[3:])
    file.write_text(f'[recipe]\ndata = "embedded"\n[placement]\nranks = 2\n{where}[factors]\nglobal_batch = [48]\n')
    assert [cell.placement for cell in plan(read(file), runs=cache).cells] == [run.placement]

    seen: list[Spec] = []
    monkeypatch.setattr("lockstep.launch.emulated.network.problem", lambda: None)
    monkeypatch.setattr(probe, "execute", lambda run, spec, progress: seen.append(spec))
    probe.measure(run.recipe, run.placement, cache / "probe", Probe())  # as explain --measure does with a run's spec
    assert [spec.placement for spec in seen] == [run.placement]

    # A fit is made on one host, with the ranks that we start ourselves, over a backend that works between hosts.
    one_host = {"hosts": 1, "emulated": False, "launcher": "spawn", "backend": "gloo"}
    _, fitted, remarks = here(recipe, placement)
    assert fitted == msgspec.structs.replace(run.placement, **one_host)
    assert here(run.recipe, as_asked(run))[1] == fitted, "a run's backend that was not stated is not stated now"
    said = "predicted over gloo, which works between hosts; backend=shm predicts ranks of this one"
    assert remarks == ([said] if fastest == "shm" else [])
    assert here(recipe, msgspec.structs.replace(placement, hosts=1, emulated=False, backend="shm"))[1].backend == "shm"


@pytest.mark.parametrize(("there", "said"), [(1, "1 core of this host"), (2, "2 cores of this host")])
def test_one_core_is_no_cores(monkeypatch: pytest.MonkeyPatch, there: int, said: str) -> None:
    monkeypatch.setattr(resolve, "cores", lambda: there)
    assert resolve._threads(Placement()) == (there, f"{said}, divided by 1 rank")


def test_a_resolved_placement_resolves_to_itself(cache: Path) -> None:
    measured(gloo=100.0, shm=10.0)
    first = resolve.resolve(Recipe(batch_per_rank=8), Placement(ranks=2))
    again = resolve.resolve(first.recipe, first.placement)
    assert again[:2] == first[:2]
    assert list(first.why) == [*DECIDED, "global_batch"]
    assert list(again.why) == ["global_batch"], "what is stated needs no reason"


def test_the_reason_of_each_decision_is_recorded_and_shown(cli: Cli) -> None:
    cli.environment["LOCKSTEP_DATA"] = str(cli.folder / "cache" / "data")  # nothing is measured there
    words = ["data=embedded", "train_limit=96", "global_batch=48", "epochs=1"]
    dry = cli("run", *words, "ranks=2", "--dry-run").stdout
    assert "# backend shm: ranks of one host share its memory; it was not measured on this machine with 2 ranks" in dry
    assert "# strategy flat: several ranks, and 17,064 bytes of gradients are one message" in dry
    stated = [f"{key}={value}" for key, value in (("strategy", "single"), ("memory_format", "contiguous"))]
    document = cli.run(*words, *stated)
    run = Run(Path(document["run"]))
    decided = [key for key in run.spec().why if key != "waiting"]  # there if the machine is busy
    assert decided == ["device", "backend", "launcher", "threads"]
    assert document["why"] == run.spec().why
    shown = cli("show", run.id).stdout
    assert "one rank exchanges nothing" in shown
    assert "vectorised" not in shown


def test_the_reason_of_an_old_run_is_kept(cache: Path) -> None:
    _, spec = specify(*load([], ["data=embedded", "ranks=2", "backend=gloo", "global_batch=48"]), Options(), cache)
    old = {**msgspec.to_builtins(spec), "why_backend": "gloo: the only one measured"}
    assert "why_backend" not in msgspec.to_builtins(spec)
    del old["why"]
    found = msgspec.json.decode(json.dumps(old), type=Spec)
    assert found.why == {"backend": "the only one measured"}
    assert "why_backend" not in msgspec.to_builtins(found)
    assert msgspec.json.decode(json.dumps({**old, "why_backend": ""}), type=Spec).why == {}


def test_a_gpu_gets_the_backend_for_gpus_whatever_is_fastest_on_the_cpu(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(gloo=100.0, shm=10.0)
    monkeypatch.setattr(resolve, "cuda_present", lambda: True)
    monkeypatch.setattr(resolve.checks, "cuda_present", lambda: True)
    found = resolve.resolve(Recipe(), Placement(ranks=2))
    assert (found.placement.device, found.placement.backend) == ("cuda", "nccl")
    assert resolve.resolve(Recipe(), Placement(ranks=2, device="cpu")).placement.backend == "shm"


def test_gradients_that_are_one_message_are_sent_flat(cache: Path) -> None:
    def strategy(recipe: Recipe, **words: Any) -> str:
        return resolve.resolve(recipe, Placement(**{"ranks": 2, **words})).placement.strategy

    small, large = Recipe(model="mnist-convnet"), Recipe(model="cifar-vgg", data="cifar10")
    assert (strategy(small), strategy(large), strategy(small, ranks=1)) == ("flat", "ddp", "single")
    assert strategy(small, ddp=Ddp(bucket_mb=1.0)) == "ddp", "who states a knob of DDP's means DDP"
    # What would have to be built is not: that takes torch, which the supervisor does without.
    assert strategy(msgspec.structs.replace(small, model="net.py:Net")) == "ddp"
    assert strategy(msgspec.structs.replace(small, regularize=Regularize(batch_norm="per-rank"))) == "ddp"
    assert resolve.resolve(small, Placement(ranks=2), script=True).placement.strategy == "ddp"


def test_what_a_script_exchanges_is_not_known(cache: Path) -> None:
    measured(gloo=100.0, shm=10.0)
    found = resolve.resolve(Recipe(model="train.py", data="own data"), Placement(ranks=2), script=True)
    assert (found.placement.backend, found.why["backend"]) == (
        "gloo",
        "what a training loop of your own exchanges is not known",
    )


def test_a_launcher_of_one_rank_is_refused_with_two() -> None:
    with pytest.raises(InputError, match="launcher=single has one rank"):
        resolve.resolve(Recipe(), Placement(ranks=2, launcher="single"))
