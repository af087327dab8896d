"""`lockstep verify -- COMMAND`: a script that was not written for Lockstep, unedited; what differs first, and why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreign_table
import verify_faults
from foreign_table import MUTANTS, RIGHT, Row, launchers, table, unseen, verdicts, written
from lockstep.errors import InputError
from lockstep.inside.ledger import Ledger
from lockstep.inside.orders import Orders
from lockstep.inside.parameters import Parameters
from lockstep.inside.site.sitecustomize import PROVEN
from lockstep.inside.sketch import coarse, digest, rows, samples, sketch
from lockstep.process import stat_fields
from lockstep.verify.foreign import words
from lockstep.verify.foreign.judge import DIFFERENT, SAME
from lockstep.verify.foreign.prove import replayed
from lockstep.verify.foreign.records import Order
from support import Cli, processes_of, wait_for
from test_verify import TABLE
from test_verify_foreign_judge import script

# --- the hooks ---------------------------------------------------------------------------------------------------------------


def test_every_module_that_has_a_hook_is_waited_for(tmp_path: Path) -> None:
    """In a process of its own: hooks stay."""
    (tmp_path / "settings.json").write_text(json.dumps({"replay": None}))
    listed = "import sys; from lockstep.inside.witness import Hooks; print(*sorted(Hooks(sys.argv[1]).by_module))"
    argv = [sys.executable, "-c", listed, str(tmp_path)]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == sorted(PROVEN), found.stderr


# --- the words of a command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "ranks", "alone"),
    [
        ("torchrun --nproc-per-node 2 train.py -n 3", 2, "torchrun --nproc-per-node 1 train.py -n 3"),
        ("torchrun --nproc_per_node=4 train.py", 4, "torchrun --nproc_per_node=1 train.py"),
        (
            "python -m torch.distributed.run --nproc-per-node 2 -m mine",
            2,
            "python -m torch.distributed.run --nproc-per-node 1 -m mine",
        ),
        (
            "accelerate launch --multi_gpu --num_processes 2 a.py --multi_gpu",
            2,
            "accelerate launch --num_processes 1 a.py --multi_gpu",
        ),
        ("mpirun -n 3 python train.py", 3, "mpirun -n 1 python train.py"),
        ("srun --ntasks=2 python train.py", 2, "srun --ntasks=1 python train.py"),
        ("mpirun -n 2 python -m mine -n 100", 2, "mpirun -n 1 python -m mine -n 100"),
        ("srun -n 2 python -m mine -n 100", 2, "srun -n 1 python -m mine -n 100"),
        ("mpirun -n 2 ./train -n 100", 2, "mpirun -n 1 ./train -n 100"),
        ("mpirun --bind-to core -n 2 ./train -n 100", 2, "mpirun --bind-to core -n 1 ./train -n 100"),
        ("srun -n 2 bash run.sh -n 5 --ntasks=3", 2, "srun -n 1 bash run.sh -n 5 --ntasks=3"),
        (
            "python -m accelerate launch --num_processes=2 -m mine",
            2,
            "python -m accelerate launch --num_processes=1 -m mine",
        ),
        ("python train.py --devices {ranks}", 2, "python train.py --devices 1"),
    ],
)
def test_the_same_command_for_one_process(command: str, ranks: int, alone: str) -> None:
    argv = command.split()
    assert words.ranks_of(argv, None) == ranks
    assert words.command(argv, 1, ranks, None) == alone.split()
    assert words.command(argv, ranks, ranks, None) == [word.replace("{ranks}", str(ranks)) for word in argv]


@pytest.mark.parametrize("no_dropout", [False, True])
def test_no_dropout_reaches_every_module_that_has_some(tmp_path: Path, no_dropout: bool) -> None:
    """Also where the rate is an attribute of a module that is no dropout itself."""

    class Attention(nn.Module):
        """As transformers has it."""

        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout, self.weight = 0.5, nn.Parameter(torch.ones(4))

        def forward(self, batch: Any) -> Any:
            return nn.functional.dropout(batch, self.attention_dropout, self.training) * self.weight

    nets: list[tuple[nn.Module, Any]] = [
        (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), torch.ones(2, 5, 16)),
        (nn.MultiheadAttention(16, 2, dropout=0.5), torch.ones(5, 2, 16)),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.5), torch.ones(3, 4)),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(3, 4)),
        (Attention(), torch.ones(64, 4)),
    ]
    settings = {"replay": None, "perturb": 0.0, "no_dropout": no_dropout, "steps": 8, "park": False, "stretch": None}
    for net, batch in nets:
        ledger, given = Ledger(str(tmp_path), settings), (batch,) * (3 if isinstance(net, nn.MultiheadAttention) else 1)
        assert ledger.trains(net)
        ledger.begin_pass(net, given, {})
        net(*given)
        ledger.end_pass()
        (seen,) = ledger._passes
        assert (seen["draws"], seen["dropout"] > 0) == (not no_dropout, not no_dropout), type(net).__name__


def test_the_batch_is_the_global_one() -> None:
    argv = ["torchrun", "--nproc-per-node", "2", "train.py", "--batch", "{batch}"]
    assert words.command(argv, 2, 2, 64)[-1] == "32"
    assert words.command(argv, 1, 2, 64)[-1] == "64"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--",), "no command after '--'"),
        (("--", "no-such-program", "{ranks}"), "there is no such program"),
        (("--", sys.executable, "train.py"), "it is not known how many ranks"),
        (("--", "torchrun", "--nproc-per-node", "1", "train.py"), "there is nothing to compare"),
        (
            ("--", "torchrun", "--nproc-per-node", "gpu", "train.py"),
            "--nproc-per-node gpu: how many ranks that is, the launcher",
        ),
        (
            ("--", "torchrun", "--nproc_per_node=auto", "train.py"),
            "--nproc_per_node auto: how many ranks that is, the launcher",
        ),
        (("--", "mpirun", "./train", "-n", "100"), "it is not known how many ranks"),
        (("--", "mpirun", "--bind-to", "core", "./train", "-n", "100"), "it is not known how many ranks"),
        (("--", "mpirun", "--oversubscribe", "env", "-n", "100"), "it is not known how many ranks"),
        (("--ranks", "3", "--", "torchrun", "--nproc-per-node", "2", "train.py"), "has no {ranks}"),
        (("--batch", "8", "--", "torchrun", "--nproc-per-node", "2", "train.py"), "has no {batch}"),
        (("--", "torchrun", "--nproc-per-node", "2", "train.py", "{batch}"), "--batch N says"),
        (("--batch", "9", "--", "torchrun", "--nproc-per-node", "2", "train.py", "{batch}"), "does not divide"),
        (("ranks=2", "--", "torchrun", "train.py"), "give one of them"),
        (("--steps", "3", "ranks=2"), "--steps: is for a command"),
        (("--no-dropout",), "--no-dropout: is for a command"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    from lockstep.cli.commands import call

    assert call(["verify", "--runs", str(tmp_path / "runs"), *options]) == InputError.exit_code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('no torch here')", "no step was seen: the command never called an optimizer of torch.optim"),
        (
            "raise ValueError('the data are not there')",
            "the command ended with exit code 1: ValueError: the data are not there",
        ),
        ("import os; os._exit(7)", "the command ended with exit code 7: it has said nothing"),
    ],
)
def test_a_command_that_comes_to_nothing_is_one_line(cli: Cli, script: str, said: str) -> None:
    (cli.folder / "mine.py").write_text(script)
    assert said in cli.error("verify", "--", sys.executable, "mine.py", "{ranks}", code=3)
    assert list(cli.runs.iterdir()) == []


def test_programs_beside_our_python_are_found_where_nothing_is_activated(cli: Cli) -> None:
    cli.environment["PATH"] = "/nowhere"
    (cli.folder / "mine.py").write_text("raise ValueError('it was started')")
    assert "ValueError: it was started" in cli.error("verify", "--", "python", "mine.py", "{ranks}", code=3)


@pytest.mark.cold
def test_ctrl_c_leaves_nothing(cli: Cli) -> None:
    (cli.folder / "waits.py").write_text("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1000)")
    process = cli.start("verify", "--", sys.executable, "waits.py", "{ranks}")
    pid = int(wait_for(lambda: (cli.folder / "pid").exists() and (cli.folder / "pid").read_text(), what="its start"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.splitlines()[-1]) == (130, "lockstep: stopped")
    wait_for(lambda: stat_fields(pid)[:1] in ([], ["Z"]), what="the end of its process")
    assert list(cli.runs.iterdir()) == []


# --- what is written down ----------------------------------------------------------------------------------------------------


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches() -> None:
    generator = torch.Generator().manual_seed(3)
    state = torch.get_rng_state()
    for shape in ((7,), (31, 5), (40, 50)):
        one, two = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        (a, size), (b, _), (both, _) = (sketch(each, 64) for each in (one, two, one + two))
        assert len(a) == min(64, one.numel())
        torch.testing.assert_close(a + b, both, rtol=0, atol=1e-12)
        assert (a.abs() <= size + 1e-12).all()
        torch.testing.assert_close(size.sum(), one.abs().sum())
    assert torch.equal(torch.get_rng_state(), state), "the script's random numbers are its own"


def test_bits_samples_and_formats() -> None:
    x, y = torch.randn(5, 3, 2), torch.arange(5)
    assert digest(x) == digest(x.clone()) != digest(x + 1e-7)
    assert rows(x.transpose(1, 2)) == rows(x.transpose(1, 2).contiguous())
    inputs, labels = samples([(x, {"y": y}), {}])
    assert inputs == rows(x)
    assert labels == rows(y)
    assert samples([("text", 3), {}]) == ([], [])
    assert (coarse(x), coarse(x.bfloat16().float()), coarse(x.half().float())) == ("", "bfloat16", "float16")
    assert coarse(torch.zeros(3)) == ""


def test_frozen_parameters_are_watched_when_they_are_freed() -> None:
    """An optimizer may have parameters that learn nothing: autograd takes no hook for them."""

    def give_up(error: BaseException) -> None:
        raise error

    free, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    parameters = Parameters(give_up)

    def seen() -> list[tuple[bool, float]]:
        (free * frozen).sum().backward()
        found = parameters.before([free, frozen])
        parameters.after([free, frozen], found)
        free.grad = frozen.grad = None
        return [(line["seen"], float(own.sum())) for line, own in zip(found["layout"], found["own"], strict=True)]

    parameters.before([free, frozen])
    assert seen() == [(True, 3.0), (True, 0.0)]
    frozen.requires_grad_()
    assert seen() == [(True, 3.0), (False, 0.0)], "it was free before we knew"
    assert seen() == [(True, 3.0), (True, 3.0)]


def test_one_process_hands_out_the_samples_of_the_ranks() -> None:
    """Pass by pass over the data, as far as they are known; then its own. Another loader is left alone."""
    wanted = {"size": 4, "length": 8, "batches": [[[0, 2, 1, 3], [4, 6, 5, 7]], [[7, 0, 1, 2]]]}
    orders = Orders(wanted)
    sampler, other = (torch.utils.data.BatchSampler(range(8), size, False) for size in (4, 2))
    own = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(orders.batches(sampler, iter(own))) == wanted["batches"][0]
    assert list(orders.batches(sampler, iter(own))) == [*wanted["batches"][1], *own]
    assert list(orders.batches(sampler, iter(own))) == own
    assert list(orders.batches(other, iter([[0, 1]]))) == [[0, 1]]
    assert [(each["size"], each["length"]) for each in orders.seen] == [(4, 8), (2, 8)]

    many, one = script()
    for rank, steps in enumerate(many):
        steps[-1].line.orders = [Order(2, 4, [[[rank, rank + 2], [rank + 4, rank + 6]]]), Order(9, 4, [])]
    one[-1].line.orders = [Order(4, 8, [own])]
    assert replayed(many, one) == Order(4, 8, [[[0, 2, 1, 3], [4, 6, 5, 7]]])
    many[1][-1].line.orders = []
    assert replayed(many, one) is None


# --- real scripts ------------------------------------------------------------------------------------------------------------


def torchrun(*arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, *arguments]


@pytest.mark.slow
def test_the_command_from_start_to_end(cli: Cli) -> None:
    """A right script, and a wrong one; nothing of theirs is overwritten, and nothing is left."""
    text = (foreign_table.SCRIPTS / "ddp.py").read_text()
    # It goes on from its last checkpoint, if there is one: a run of ours must not leave one to the next. The others wait for that of rank 0.
    resume = """import os, shutil, time
if os.path.exists('last.pt'):
    net.load_state_dict(torch.load('last.pt'))
dist.barrier()
if rank == 0:
    torch.save(net.state_dict(), 'init.pt')
while not os.path.exists('init.pt'):
    time.sleep(0.01)
model = DistributedData"""
    text = text.replace("model = DistributedData", resume, 1)
    save = """    if rank == 0:
        torch.save(net.state_dict(), 'new.pt')
        os.replace(src='new.pt', dst='last.pt')
        torch.save(net.state_dict(), 'kept.pt')
        shutil.copyfile('kept.pt', 'model_best.pt')
    for number, (a, b, index)"""
    # One process shuffles otherwise, as many scripts do.
    text = text.replace("sampler=sampler)", "sampler=sampler if world > 1 else None, shuffle=world == 1)")
    (cli.folder / "train.py").write_text(text.replace("    for number, (a, b, index)", save))
    (cli.folder / "kept.pt").write_text("the user's own")
    (cli.folder / "model_best.pt").write_text("the user's best")
    right = cli("verify", "--steps", "5", "--", *torchrun("train.py"))
    assert right.returncode == 0, right.stderr
    assert right.stdout.startswith(
        "the same: in 5 of 5 steps 2 ranks compute what one process computes, 32 samples a step\n"
    )
    assert "which is made for 16" in right.stdout
    assert "the one process shuffles otherwise" in right.stdout
    wrong = cli("verify", "--json", "--", *torchrun("train.py", "plain", "sum", "3"))
    found = json.loads(wrong.stdout)
    assert wrong.returncode == 3
    assert (found["verdict"], found["reason"], found["first_step"]) == ("different", "summed", 3)
    assert found["sentence"].startswith(
        "NOT the same: from step 3 on, gradients of 2 ranks are 2.00 times those of one process"
    )
    saved = {path.name: path.read_text() for path in cli.folder.glob("*.pt")}
    assert saved == {"kept.pt": "the user's own", "model_best.pt": "the user's best"}
    # Nothing is left but a page of each.
    assert [folder.name for folder in cli.runs.iterdir()] == ["proofs"]
    pages = sorted((cli.runs / "proofs").glob("*-train-*/report.html"))
    assert len(pages) == 2
    assert right.stderr.endswith(f"page: {pages[0]}\n")
    assert (found["page"], pages[1].read_text().count("NOT the same: from step 3 on")) == (str(pages[1]), 1)
    assert json.loads((pages[1].parent / "proof.json").read_text())["reason"] == "summed"
    assert not processes_of(cli.folder)


@pytest.mark.slow
def test_a_script_that_is_not_seeded_proves_nothing(cli: Cli) -> None:
    text = (foreign_table.SCRIPTS / "ddp.py").read_text()
    (cli.folder / "train.py").write_text(text.replace("torch.manual_seed(int(SEED) + ", "torch.seed() or ("))
    found = cli("verify", "--", *torchrun("train.py"))
    assert found.returncode == 3
    assert found.stdout.startswith(
        "not proven: as one process the script computes something else each time it runs (its starting weights): seed it"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"), [("", "the same: in 4 of 4 steps 4 ranks"), ("a part 1 % off", "NOT the same: from step 1 on")]
)
def test_parameters_that_are_divided_within_groups_of_ranks(cli: Cli, fault: str, said: str) -> None:
    (cli.folder / "train.py").write_text((foreign_table.SCRIPTS / "sharded.py").read_text())
    launcher = [word.replace("2", "4") if word == "2" else word for word in torchrun("train.py", "replicas", fault)]
    found = cli("verify", "--steps", "4", "--", *launcher)
    assert found.stdout.startswith(said), (found.stdout, found.stderr)


@pytest.mark.slow
def test_adam_in_16_bits_is_proven(tmp_path: Path) -> None:
    """Its first updates are signs, which a gradient of 8 bits leaves open where it is small."""
    right = [Row("amp-adam", seed=seed) for seed in range(6)]
    wrong = [Row("amp-adam", fault, start) for fault in ("updates too large", "no update") for start in (1, 5)]
    found = verdicts("ddp", [*right, *wrong], tmp_path)
    assert {row: found[row].sentence for row in right if found[row].verdict != SAME} == {}
    assert [(found[row].reason, found[row].findings[0].step) for row in wrong] == [
        ("update", 1), ("update", 5), ("not updated", 1), ("not updated", 5)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["ddp", "by_hand", "sharded"])
def test_every_fault_in_a_script_is_found_or_known_not_to_be(tmp_path: Path, script: str) -> None:
    _check(script, tmp_path, None)


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
def test_every_fault_in_a_script_with_accelerate_is_found(tmp_path: Path, frameworks: Path) -> None:
    _check("accelerated", tmp_path, launchers(str(frameworks)))


def _check(script: str, folder: Path, launch: tuple[list[str], list[str]] | None) -> None:
    """Faults are found, in the step in which they begin, for the reason that docs/verify.md has; and right scripts raise no alarm."""
    right = [Row(kind, seed=seed) for kind in RIGHT[script] for seed in range(3)]
    found = verdicts(script, [*MUTANTS[script], *right], folder, launch)
    assert {row: found[row].sentence for row in right if found[row].verdict != SAME} == {}
    for row in MUTANTS[script]:
        assert (found[row].verdict == DIFFERENT) != bool(unseen(script, row)), (row, found[row].sentence)
    assert table(script, {row: found[row] for row in MUTANTS[script]}) == written(script), (
        "python tests/foreign_table.py"
    )


def test_the_page_counts_the_faults_of_all_three_kinds() -> None:
    """docs/verify.md: those in Lockstep's own parts, in a user's strategy, and in foreign scripts."""
    names = {name.partition("_from_")[0] for name, _ in TABLE}
    strategy = {
        name
        for name in names
        if "_breakage" not in {key for kind in getattr(verify_faults, name).__mro__[:-3] for key in vars(kind)}
    }
    page = foreign_table.PAGE.read_text()
    foreign = {
        (script, row.kind, row.fault)
        for script, mutants in MUTANTS.items()
        for row in mutants
        if not unseen(script, row)
    }
    variants = sum(not unseen(script, row) for script, mutants in MUTANTS.items() for row in mutants)
    for count, kind in (
        (
            f"{len(names - strategy)} | {sum(n.partition('_from_')[0] not in strategy for n, _ in TABLE)}",
            "Lockstep's own parts",
        ),
        (f"{len(strategy)} | {sum(n.partition('_from_')[0] in strategy for n, _ in TABLE)}", "a user's strategy"),
        (f"{len(foreign)} | {variants}", "a foreign script"),
    ):
        assert f"| {kind} | {count} |" in page
