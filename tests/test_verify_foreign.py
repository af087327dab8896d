"""`lockstep verify -- COMMAND`: a script that was not written for Lockstep, unedited; what differs first, and why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import foreign_table
import verify_faults
from foreign_table import MUTANTS, RIGHT, Row, launchers, table, unseen, verdicts, written
from lockstep.errors import InputError
from lockstep.inside.orders import Orders
from lockstep.inside.parameters import Parameters
from lockstep.inside.site.sitecustomize import PROVEN
from lockstep.inside.sketch import coarse, digest, rows, samples, sketch
from lockstep.process import stat_fields
from lockstep.report.document import of_parts
from lockstep.report.html import page
from lockstep.report.proof import proof_part
from lockstep.report.views import Lines
from lockstep.verify.foreign import words
from lockstep.verify.foreign.judge import DIFFERENT, OPEN, SAME, Judge
from lockstep.verify.foreign.prove import replayed
from lockstep.verify.foreign.records import Line, Order, Pass, Rank, Step, Tensor
from support import Cli, processes_of, wait_for
from test_verify import TABLE

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
        ("python train.py --devices {ranks}", 2, "python train.py --devices 1"),
    ],
)
def test_the_same_command_for_one_process(command: str, ranks: int, alone: str) -> None:
    argv = command.split()
    assert words.ranks_of(argv, None) == ranks
    assert words.command(argv, 1, ranks, None) == alone.split()
    assert words.command(argv, ranks, ranks, None) == [word.replace("{ranks}", str(ranks)) for word in argv]


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


# --- the judge, on records made by hand --------------------------------------------------------------------------------------

WEIGHTS = 6


def step(number: int, rank: int, own: np.ndarray, exchanged: np.ndarray, samples: list[str], lr: float = 0.1) -> Step:
    tensor = Tensor("w", WEIGHTS, "float32", "o", f"{number - 1}", f"{number}", False, True, "", "")
    line = Line(
        number,
        0,
        [{"lr": lr}],
        [Pass(samples, [], 0, 0, "r", False)],
        [1.0],
        1.0,
        False,
        [],
        [tensor],
        {},
        [],
        False,
        [],
        [],
    )
    return Step(line, own, np.abs(own), exchanged, exchanged, -lr * exchanged, np.ones(WEIGHTS))


def script(steps: int = 4, wrong: int = 0, times: float = 1.0, lr: float = 0.1) -> tuple[list[Rank], Rank]:
    """Two ranks and one process. In step `wrong`, the exchanged gradient is so many times what it should be, or the learning rate another."""
    generator = np.random.default_rng(0)
    many: list[Rank] = [[], []]
    one: Rank = []
    for number in range(1, steps + 1):
        own = [generator.normal(size=WEIGHTS) for _ in range(2)]
        mean = (own[0] + own[1]) / 2
        names = [[f"{number}{rank}{place}" for place in "ab"] for rank in "01"]
        got = mean * (times if number == wrong else 1.0)
        for rank in range(2):
            many[rank].append(step(number, rank, own[rank], got, names[rank], lr if number == wrong else 0.1))
        one.append(step(number, 0, mean, mean, [*names[0], *names[1]]))
    return many, one


def test_what_is_the_same_passes_and_the_first_difference_is_named() -> None:
    many, one = script()
    assert Judge(many, one, one).verdict().verdict == SAME
    for number in (1, 3):
        many, one = script(wrong=number, times=2.0)
        found = Judge(many, one, one).verdict()
        assert found.sentence.startswith(
            f"NOT the same: from step {number} on, gradients of 2 ranks are 2.00 times those of one process"
        )
        many, one = script(wrong=number, times=1.00001)
        assert (Judge(many, one, one).verdict().reason, Judge(many, None, None, "why").verdict().reason) == (
            "scaled",
            "scaled",
        )
        many, one = script(wrong=number, lr=0.2)
        assert Judge(many, one, one).verdict().reason == "lr scaled"
    many, one = script(wrong=2, times=float("nan"))
    assert Judge(many, one, one).verdict().verdict == DIFFERENT


def test_what_is_not_finite_in_one_process_too_proves_nothing() -> None:
    many, one = script()
    for steps in (*many, one):
        for each in steps[1:]:
            for name in ("own", "size", "exchanged", "final", "update"):
                setattr(each, name, getattr(each, name) * np.nan)
    found = Judge(many, one, one).verdict()
    assert (found.verdict, found.reason, found.findings[0].step) == (OPEN, "not finite", 2)
    assert found.sentence.startswith("not proven: from step 2 on, the gradient of one process is not finite ('w')")


@pytest.mark.parametrize(("noise", "verdict"), [(0.01, SAME), (0.2, OPEN), (3.0, OPEN)])
def test_a_script_whose_roundings_matter_too_much_proves_nothing(noise: float, verdict: str) -> None:
    """What is allowed is six times what rounding does: where that is half of a gradient, half of it could be wrong."""
    many, one = script()
    twin = deepcopy(one)
    for each in twin:
        each.own = each.own * (1 + noise)
    found = Judge(many, one, twin).verdict()
    assert found.verdict == verdict
    if verdict == OPEN:
        assert found.reason == "rounding"
        assert f"changes so much that {6 * noise:.0%} of it has to be allowed ('w')" in found.sentence
        assert found.sentence.endswith("rounding; seed whatever is random"), "a first step has no learning rate"
    for each in many[0] + many[1]:
        each.exchanged = each.exchanged * 1.01
    assert Judge(many, one, twin).verdict().verdict == DIFFERENT, "the exchange is judged within the ranks"


def test_what_can_be_done_about_it_depends_on_where_it_begins() -> None:
    many, one = script()
    twin = deepcopy(one)
    for each in twin[2:]:
        each.own = each.own * 1.5
    said = Judge(many, one, twin).verdict().sentence
    assert said.endswith("seed whatever is random, or take a smaller learning rate or fewer steps (--steps 2)")
    for each in one:
        each.line.autocast = True
    said = Judge(many, one, twin).verdict().sentence
    assert said.endswith("prove it in float32, or take a smaller learning rate or fewer steps (--steps 2)")


def split(ranks: list[Rank], **parameters: int) -> None:
    """The same records, of parameters with these names and lengths."""
    for each in [step for steps in ranks for step in steps]:
        layout = [replace(each.line.layout[0], name=name, length=length) for name, length in parameters.items()]
        each.line.layout = layout


@pytest.mark.parametrize("times", [float("nan"), 1e4])
def test_an_update_that_rounding_could_hide_in_one_parameter_of_many_proves_nothing(times: float) -> None:
    many, one = script()
    twin = deepcopy(one)
    split([*many, one, twin], a=2, b=2, c=1, d=1)
    assert Judge(many, one, twin).verdict().verdict == SAME
    first = np.array([1, 1, 0, 0, 0, 0], dtype=bool)
    for each in twin:
        each.update = np.where(first, times * each.update, each.update)
    found = Judge(many, one, twin).verdict()
    assert (found.verdict, found.reason) == (OPEN, "rounding")
    assert "the update of one process" in found.sentence
    assert "('a')" in found.sentence
    for each in many[0] + many[1]:
        each.update = np.where(first, 5000 * each.update, each.update)
    assert Judge(many, one, twin).verdict().verdict == OPEN
    assert Judge(many, one, one).verdict().reason == "update"


@pytest.mark.parametrize(("times", "verdict"), [(1.0, SAME), (1.1, SAME), (1.5, DIFFERENT), (0.0, DIFFERENT)])
def test_where_all_signs_of_a_parameter_are_open_its_update_is_judged_by_its_size(times: float, verdict: str) -> None:
    """Adam makes whole steps of a gradient that is 0 but for rounding, as that of the keys' bias in attention."""
    many, one = script()
    split([*many, one], a=2, b=2, c=2)
    first = np.array([1, 1, 0, 0, 0, 0], dtype=bool)
    for each in [step for steps in (*many, one) for step in steps]:
        each.line.settings[0]["eps"] = 1e-8
        each.update = np.full(WEIGHTS, -0.1)
    twin = deepcopy(one)
    for each in twin:
        each.update = np.where(first, [0.1, -0.1, 0, 0, 0, 0], each.update)
    for each in many[0] + many[1]:
        each.update = np.where(first, np.array([-0.1, 0.1, 0, 0, 0, 0]) * times, each.update)
    assert Judge(many, one, twin).verdict().verdict == verdict
    for each in many[0] + many[1]:
        each.update = one[0].update
    for each in twin:  # its size is open, too
        each.update = np.where(first, 2 * each.update, each.update)
    assert Judge(many, one, twin).verdict().reason == "rounding"


def test_an_update_of_a_few_roundings_of_its_weight_may_be_rounding_alone() -> None:
    """As that of a learning rate that warms up."""
    many, one = script()
    for each in [step for steps in (*many, one) for step in steps]:
        each.update = each.update * 1e-6
    twin = deepcopy(one)
    for each in twin:
        each.update = each.update * 1.2
    assert Judge(many, one, twin).verdict().verdict == SAME
    for each in [step for steps in (*many, one, twin) for step in steps]:
        each.weights = each.weights / 100
    assert Judge(many, one, twin).verdict().reason == "rounding"


@pytest.mark.parametrize(("off", "verdict"), [(1.0, SAME), (1.2, SAME), (1.35, DIFFERENT)])
def test_of_signs_the_root_of_what_the_gradient_does_is_allowed(off: float, verdict: str) -> None:
    """Adam's first steps in 16 bits: 1 % of a gradient is 11 % of an update, and 6 % is 28 %, not 68 %."""
    many, one = script()
    for each in [step for steps in (*many, one) for step in steps]:
        each.line.autocast = True
        each.line.settings[0]["beta2"] = 0.999
    twin = deepcopy(one)
    for each in twin:
        each.own, each.update = each.own * 1.01, each.update * 1.11
    for each in many[0] + many[1]:
        each.update = each.update * off
    assert Judge(many, one, twin).verdict().verdict == verdict
    for each in one:  # SGD's follow the gradients themselves
        each.line.settings[0] = {"lr": 0.1}
    assert Judge(many, one, twin).verdict().verdict == OPEN


def test_a_single_sign_of_a_gradient_that_is_nearly_nothing_is_no_fault() -> None:
    """Adam turns it into a whole step; that of an entry that is not small is a fault."""
    for size, verdict in ((1e-3, SAME), (0.5, DIFFERENT)):
        many, one = script()
        last = np.array([0, 0, 0, 0, 0, 1], dtype=bool)
        for each in [step for steps in (*many, one) for step in steps]:
            for name in ("own", "size", "exchanged", "final"):
                setattr(each, name, np.where(last, size, 1.0))
            each.update = np.full(WEIGHTS, -0.1)
            each.line.settings[0]["eps"] = 1e-8
        for each in many[0] + many[1]:
            each.update = np.where(last, 0.1, -0.1)
        assert Judge(many, one, one).verdict().verdict == verdict, size


def test_a_gradient_that_is_nothing_beside_the_others_may_be_rounding_alone() -> None:
    """As that of a bias before batch norm, which is 0 but for rounding."""
    many, one = script()
    twin = deepcopy(one)
    split([*many, one, twin], b=2, w=4)
    for each in [step for steps in (*many, one, twin) for step in steps]:
        for name in ("own", "size", "exchanged", "final", "update"):
            setattr(each, name, getattr(each, name) * np.array([1e-7, 1e-7, 1, 1, 1, 1]))
    for each in twin:
        each.own = each.own * np.array([3, 3, 1, 1, 1, 1])
    assert Judge(many, one, twin).verdict().verdict == SAME


def test_other_numbers_of_steps_are_a_difference() -> None:
    many, one = script()
    found = Judge(many, one[:3], one[:3]).verdict()
    assert found.sentence == "NOT the same: from step 4 on, 2 ranks take 4 steps, and one process takes 3"
    found = Judge([many[0], many[1][:2]], one, one).verdict()
    assert found.sentence == "NOT the same: from step 3 on, rank 0 takes 4 steps, and rank 1 takes 2"


def test_samples_that_were_not_seen_are_not_called_right() -> None:
    many, one = script()
    assert "samples of every step" in {check.what for check in Judge(many, one, one).verdict().checks}
    for each in [step for steps in (*many, one) for step in steps]:
        each.line.passes[0].inputs = []
    found = Judge(many, one, one).verdict()
    assert found.verdict == SAME
    assert found.sentence.endswith("what one process computes; the samples that they took were not seen")
    assert "samples of every step" not in {check.what for check in found.checks}


def test_without_one_process_nothing_is_proven() -> None:
    many, _ = script()
    found = Judge(many, None, None, "1 process: it ended with exit code 1").verdict()
    assert (found.verdict, found.sentence) == (OPEN, "not proven: 1 process: it ended with exit code 1")


def test_the_page_has_every_step_with_what_is_allowed() -> None:
    many, one = script(wrong=3, times=2.0)
    part = proof_part(Judge(many, one, one).verdict(), ["torchrun", "train.py"], "train.py")
    assert part.headlines[0].verdict.startswith("NOT the same: from step 3 on")
    assert part.headlines[0].next == "mend it, and prove it again: lockstep verify -- torchrun train.py"
    loss, differences = part.charts
    assert isinstance(loss, Lines)
    assert isinstance(differences, Lines)
    assert [len(series.x) for series in loss.series] == [4, 4]
    assert loss.series[1].low[0] == pytest.approx(1.0 - 1e-4)
    drawn = {series.name: dict(zip(series.x, series.y, strict=True)) for series in differences.series}
    assert drawn["allowed"] == {1: 1, 4: 1}
    assert (drawn["gradient"][2] or 0) < 1 < (drawn["gradient"][3] or 0)
    assert set(drawn["gradient"]) == {1, 2, 3}, "from then on they have other weights"
    assert [mark.x for mark in differences.marks] == [3]
    many, one = script()
    assert proof_part(Judge(many, one, one).verdict(), ["torchrun"], "train.py").facts[0] == ("verdict", "same")
    assert page(of_parts([part])).count("</html>") == 1


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
