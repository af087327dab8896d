"""The benchmark's own arithmetic and files; no peer is needed, and nothing here is timed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed; bare `pytest` does not look in the root by itself

from benchmarks import environment, no_exchange, noise, ours, parts, record, rounds, stats  # noqa: E402
from benchmarks import run as runner  # noqa: E402
from benchmarks.peers import common, report_loop, tensor_loader  # noqa: E402
from benchmarks.planted import causes, score  # noqa: E402
from benchmarks.processes import ContenderFailed, parse_line, run  # noqa: E402
from benchmarks.record import Measurement, Section, compare  # noqa: E402
from benchmarks.rounds import Span  # noqa: E402
from benchmarks.sections import attach, peers, shares, tune  # noqa: E402
from benchmarks.settings import Settings  # noqa: E402
from benchmarks.suspects import causes as suspects  # noqa: E402

from lockstep import strategies  # noqa: E402
from lockstep.settings import load  # noqa: E402
from lockstep.turns import ranks  # noqa: E402

MACHINE = {"cpu": "Some CPU", "versions": {"torch": "1.2.3"}, "load_at_start": [0.1, 0.2, 0.3]}
SETTINGS = {"rounds": 2}


def measured(name: str, seconds: list[float], loss: float = 0.5, units: int = 100) -> list[Measurement]:
    details = {"loss": loss, "accuracy": 0.9}
    return [Measurement(number, number, name, units, wall, 2 * wall, details) for number, wall in enumerate(seconds, 1)]


def section(*groups: list[Measurement]) -> Section:
    return Section("peers", "A title", "images", "rate", [one for group in groups for one in group])


# Statistics


@pytest.mark.parametrize("n", [3, 5, 25])
def test_the_interval_of_a_ratio_covers_its_median_with_few_rounds_too(n: int) -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        interval = stats.interval(list(np.exp(generator.normal(0.1, 0.05, n))), log=True)
        assert interval is not None
        hits += interval[0] <= np.exp(0.1) <= interval[1]
    assert hits >= 273, "95 % are meant: fewer than 273 of 300 happen once in 300 times"


def test_one_value_has_no_interval() -> None:
    assert stats.interval([2.0]) is None


def test_ratio_is_taken_within_a_round() -> None:
    # The machine became three times slower in round 2: the ratio must not notice.
    assert stats.ratio_per_round({1: 2.0, 2: 6.0, 3: 9.0}, {2: 3.0, 1: 1.0}) == [2.0, 2.0]
    assert stats.difference_per_round({1: 5.0}, {1: 3.0, 2: 1.0}) == [2.0]


def test_relative_spread() -> None:
    assert stats.relative_spread([2.0, 2.0]) == 0
    assert stats.relative_spread([1.0, 1.5, 1.2]) == pytest.approx(0.5)
    assert stats.relative_spread([1.0, float("nan")]) == float("inf")


# Comparisons and their verdicts


def test_speed_is_their_time_over_ours() -> None:
    found = compare([*measured("a", [1.0, 2.0]), *measured("b", [2.0, 4.0])], "a", "b", "speed", target=1.5)
    assert found is not None
    assert found.values == [2.0, 2.0]
    assert (found.median, found.interval, found.verdict) == (2.0, (2.0, 2.0), "met")


def test_verdict_wants_the_whole_interval() -> None:
    both = [*measured("a", [1.0] * 5), *measured("b", [1.2, 1.3, 1.6, 1.7, 1.8])]
    speed = compare(both, "a", "b", "speed", target=1.5)
    assert speed is not None
    assert speed.verdict == "met by the median only"
    missed = compare(both, "a", "b", "speed", target=1.65)
    assert missed is not None
    assert missed.verdict == "missed"


def test_share_and_difference_have_upper_bounds() -> None:
    both = [*measured("clock", [0.01], units=1), *measured("step", [2.0], units=1)]
    share = compare(both, "clock", "step", "share", target=0.01)
    assert share is not None
    assert share.median == pytest.approx(0.005)
    assert share.verdict == "met (n = 1)"
    difference = compare(both, "step", "clock", "difference", target=1000)
    assert difference is not None
    assert difference.median == pytest.approx(1990)
    assert difference.verdict == "missed"


def test_cpu_clock_is_its_own_comparison() -> None:
    found = compare([*measured("a", [1.0]), *measured("b", [3.0])], "a", "b", "speed", "cpu")
    assert found is not None
    assert found.values == [3.0]
    assert found.verdict == ""


def test_no_common_round_is_no_comparison() -> None:
    assert compare(measured("a", [1.0]), "a", "absent", "speed") is None


# Files


def test_writer_keeps_every_raw_value_in_order(tmp_path: Path) -> None:
    one = section(measured("lockstep", [1.0, 1.1]), measured("peer", [2.0, 2.3]))
    found = compare(one.measurements, "lockstep", "peer", "speed", target=1.5)
    assert found is not None
    one.comparisons.append(found)
    table = record.write(tmp_path / "results", "2000-01-01-peers", one, MACHINE, SETTINGS)
    document = json.loads((tmp_path / "results" / "2000-01-01-peers.json").read_text())
    assert [m["wall_seconds"] for m in document["measurements"]] == [1.0, 1.1, 2.0, 2.3]
    assert document["machine"] == MACHINE
    assert document["comparisons"][0]["verdict"] == "met"
    assert document["comparisons"][0]["values"] == pytest.approx([2.0, 2.3 / 1.1])
    assert table.name == "2000-01-01-peers.md"


def test_markdown_has_contenders_comparisons_and_machine() -> None:
    one = section(measured("lockstep", [0.01, 0.02]), measured("peer", [0.02, 0.04]))
    found = compare(one.measurements, "lockstep", "peer", "speed", target=1.5)
    assert found is not None
    one.comparisons.append(found)
    text = record.as_markdown(one, MACHINE, SETTINGS)
    assert "| lockstep | 7,500 | 5,000 | 10,000 | 3,750 | 2 | 0.500000 | 90.00% |" in text
    assert "| lockstep times the speed of peer | wall | 2.00 | 2.00 to 2.00 | 2 | ≥ 1.50 | met |" in text
    assert "- load at start: 0.1, 0.2, 0.3" in text
    assert "- versions: torch 1.2.3" in text
    assert "not valid" not in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| lockstep |")}
    assert widths == {text.splitlines()[2].count("|")}


def test_markdown_says_when_figures_are_not_valid() -> None:
    one = section(measured("lockstep", [1.0]))
    one.refuse("a reason")
    text = record.as_markdown(one, MACHINE, SETTINGS)
    assert "**These figures are not valid: see the notes.**" in text
    assert "- Not valid: a reason" in text


def test_markdown_has_no_table_of_contenders_that_would_say_nothing() -> None:
    once = [Measurement(1, 1, "lockstep", 1, 2.0, 0.0), Measurement(2, 1, "peer", 1, 3.0, 0.0)]
    assert "| lockstep |" not in record.as_markdown(section(once), MACHINE, SETTINGS)
    timed = [*once, Measurement(3, 2, "peer", 1, 3.0, 1.5)]
    assert "| lockstep |" in record.as_markdown(section(timed), MACHINE, SETTINGS)


# Rounds


def test_every_round_has_every_contender_in_a_shuffled_order() -> None:
    contenders = {name: lambda: Span(1, 1.0, 1.0, {}) for name in "abcdef"}
    outcome = rounds.interleave("test", contenders, count=4, seed=3)
    orders = [[m.contender for m in outcome.measurements if m.round == number] for number in range(1, 5)]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert [m.order for m in outcome.measurements] == list(range(1, 25))
    again = rounds.interleave("test", contenders, count=4, seed=3)
    assert [m.contender for m in again.measurements] == [m.contender for m in outcome.measurements]


def test_a_contender_that_fails_is_left_out_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Span:
        raise ContenderFailed("exit code 1")

    outcome = rounds.interleave("test", {"good": lambda: Span(1, 1.0, 1.0, {}), "bad": fail}, count=3)
    assert [m.contender for m in outcome.measurements] == ["good"] * 3
    assert outcome.failures == {"bad": "exit code 1"}
    assert "bad failed and is left out" in capsys.readouterr().err


# Checks of the peers' section


def test_equal_losses_are_valid_and_different_ones_are_not() -> None:
    good = section(measured("a", [1.0], loss=0.30001), measured("b", [1.0], loss=0.30002))
    peers.check_mathematics(good)
    assert good.valid
    bad = section(measured("a", [1.0], loss=0.300), measured("b", [1.0], loss=0.301))
    peers.check_mathematics(bad)
    assert not bad.valid


def test_different_numbers_of_images_are_not_valid() -> None:
    uneven = section(measured("a", [1.0], units=100), measured("b", [1.0], units=200))
    peers.check_mathematics(uneven)
    assert not uneven.valid


def test_another_torch_is_not_valid() -> None:
    one = section(measured("lockstep", [1.0]))
    versions = {"versions": {"torch": "1.0"}, "loss": 0.5}
    one.measurements.append(Measurement(2, 1, "peer", 100, 1.0, 1.0, versions))
    peers.check_versions(one, "1.0")
    assert one.valid
    peers.check_versions(one, "2.0")
    assert not one.valid


# The command line


def test_default_runs_everything_and_is_no_trial() -> None:
    settings, sections, folder, trial = runner.parse([])
    assert sections == list(runner.SECTIONS)
    assert {
        "peers",
        "scaling",
        "instrumentation",
        "start",
        "first",
        "exchange",
        "techniques",
        "turns",
        "studies",
        "shares",
        "tune",
        "attach",
        "attach-held-out",
        "attach-cost",
        "attached-predict",
        "loader",
        "slow-link",
        "listing",
        "explain",
        "predict",
        "dashboard",
        "quantization",
        "kernels",
    } == set(sections)
    assert (settings.repeats, settings.samples, trial) == (5, None, False)
    assert folder.name == "results"
    assert list(peers.select(settings)) == list(peers.PEERS)


def test_only_takes_sections_and_contenders() -> None:
    settings, sections, _, trial = runner.parse(["--only", "lightning,start", "--quick"])
    assert sections == ["peers", "start"]
    assert (settings.repeats, settings.samples, trial) == (2, 3200, True)
    assert list(peers.select(settings)) == ["lightning"]
    assert not settings.chosen("lockstep")


@pytest.mark.parametrize("words", [["--only", "nonsense"], ["--repeats", "0"], ["--samples", "many"]])
def test_bad_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runner.parse(words)
    assert stop.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_failing_process_is_an_error_without_a_path() -> None:
    with pytest.raises(ContenderFailed, match=r"^exit code 3$"):
        run([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ContenderFailed, match=r"^absent is not installed$"):
        run(["/no/such/absent"])


def test_json_is_read_from_the_last_line() -> None:
    assert parse_line('chatter\n{"images": 1}\n') == {"images": 1}
    for text in ("", "chatter\n", "[1]\n"):
        with pytest.raises(ContenderFailed):
            parse_line(text)


# Our own command line


def stub(folder: Path, document: object) -> str:
    """A stand-in for `lockstep` that prints a document and keeps the words it was given."""
    script = folder / "lockstep"
    words = f"import sys; open({str(folder / 'words')!r}, 'w').write(' '.join(sys.argv[1:]))"
    script.write_text(f"#!{sys.executable}\n{words}\nprint({json.dumps(json.dumps(document))})\n", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def test_adapter_states_the_job_and_reads_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = [{"train_loss": 0.25, "train_accuracy": 0.9, "test_accuracy": 0.8}]
    document = {"train_seconds": 2.0, "train_cpu_seconds": 1.9, "train_images": 640, "epochs": epochs}
    path = stub(tmp_path, {**document, "checkpoint_seconds": 0.5})
    monkeypatch.setattr(ours, "executable", lambda: path)
    details = {"loss": 0.25, "accuracy": 0.9, "checkpoint_seconds": 0.5}
    assert ours.train(32, 1, 1, 640, None) == Span(640, 2.0, 1.9, details)
    words = (tmp_path / "words").read_text().split()
    assert words[0] == "run"
    assert {"global_batch=32", "ranks=1", "threads=1", "shuffle=false", "seed=123", "train_limit=640"} <= set(words)


def test_adapter_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stub(tmp_path, {"epochs": [{}]})
    monkeypatch.setattr(ours, "executable", lambda: path)
    with pytest.raises(ContenderFailed, match="train_images"):
        ours.train(32, 1, 1, None, None)


# The peers' requirements and their mathematics


def test_requirements_are_exact_and_have_our_torch() -> None:
    lines = environment.REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert packages[0].startswith("torch==")
    assert all("==" in line for line in packages)
    own = environment.pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    theirs = environment.pins("\n".join(lines))
    assert theirs["torch"] == own["torch"]
    assert theirs["lightning"].startswith("2.6.")
    assert theirs["accelerate"].startswith("1.15.")


@pytest.fixture
def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    images = generator.integers(0, 256, (72, 1, 28, 28), dtype=np.uint8)
    return images, generator.integers(0, 10, 72, dtype=np.uint8)


def test_per_sample_transforms_equal_the_resident_tensors(samples: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = samples
    pictures, resident = common.Pictures(images, labels), common.normalised(images)
    for index in (0, 7, 71):
        image, label = pictures[index]
        assert torch.equal(image, resident[index])
        assert label == labels[index]
    assert resident.min() == -1.0
    assert resident.max() == 1.0


def test_net_has_the_published_size_and_a_fixed_start() -> None:
    first, second = common.build_net(common.Options()), common.build_net(common.Options(channels_last=True))
    assert sum(p.numel() for p in first.parameters()) == 4266
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_loops_agree_and_count_a_partial_last_batch(samples: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = samples  # 72 samples: two batches of 32 and one of 8
    report = report_loop.train(images, labels, common.Options())
    variants = [
        common.Options(),
        common.Options(per_sample_transforms=True),
        common.Options(fused_adam=True, channels_last=True),
    ]
    for options in variants:
        other = tensor_loader.train(images, labels, options)
        assert other.loss == pytest.approx(report.loss, rel=1e-5)
        assert other.accuracy == report.accuracy
        assert other.seconds > 0


def test_data_of_another_shape_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "train-images.npy", np.zeros((4, 28, 28), np.uint8))
    np.save(tmp_path / "train-labels.npy", np.zeros(4, np.uint8))
    with pytest.raises(SystemExit, match="wanted uint8"):
        common.read_data(tmp_path, None)


def test_the_limit_of_two_ranks_is_measured_by_a_strategy_that_lockstep_takes() -> None:
    assert strategies.kind_of(f"{no_exchange.__file__}:NoExchange").__name__ == "NoExchange"


def test_a_part_is_measured_once_until_its_section_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"n": len(made)}

    assert [parts.kept("tune", cell, make)["n"] for cell in ("a", "a", "b")] == [1, 1, 2]
    monkeypatch.setattr("benchmarks.machine.commit", lambda: "another")
    assert parts.kept("tune", "a", make)["n"] == 3, "other source measures for itself"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(parts, "cpu_model", lambda: "AMD EPYC (family 25, model 1)")
        assert parts.kept("tune", "a", make)["n"] == 4, "and so does another processor"
    assert parts.kept("tune", "a", make)["n"] == 3
    parts.forget("tune")
    assert parts.kept("tune", "a", make)["n"] == 5


def test_a_result_says_how_long_its_section_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 90.0))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(runner.machine, "describe", dict)
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    monkeypatch.setitem(runner.SECTIONS, "start", lambda settings: section(measured("lockstep", [1.0])))
    assert runner.main(["--only", "start", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-start.json")
    assert json.loads(file.read_text())["settings"]["minutes"] == 1.5


def planted_row(cause: str, planted: float, stated: float | None, first: str = "", **more: Any) -> dict[str, Any]:
    return {
        "cause": cause,
        "planted": planted,
        "true": planted,
        "first": first,
        "named_first": bool(first) and cause != "nothing",
        "stated": stated,
        **more,
    }


def test_ways_that_have_no_room_in_memory_beside_the_others_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = tune.Cell("mnist-convnet, batch 32", "1gbit,0.5ms", 2)
    ways = {" ".join(words): (*cell.words, *words) for words in tune._everything(cell)}

    def room_for(count: int) -> tuple[int, list[str]]:
        monkeypatch.setattr(ranks, "available_bytes", lambda: count * ranks.RANK_BYTES)
        found, left_out = tune.fitting(ways)
        assert [*found, *left_out] == [*ways]
        assert sum(load([], words)[1].ranks for words in found.values()) <= count
        return len(found), left_out

    needed = sum(load([], words)[1].ranks for words in ways.values())
    assert room_for(needed) == (len(ways), [])
    assert room_for(needed - 1) == (len(ways) - 1, list(ways)[-1:])
    assert len(room_for(needed // 2)[1]) > 10


@pytest.mark.parametrize("starts", [3, 8])
def test_recorded_noise_has_the_size_that_it_had(starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both that of starts, around a truth that is not known, and that of rounds within them."""
    rng, between, within = np.random.default_rng(3), 0.02, 0.01
    found = []
    for _ in range(1500):
        lives = rng.normal(0.5, between, starts)
        made = [list(rng.normal(life, within, 20)) for life in lives]
        monkeypatch.setattr(noise.estimate, "by_start", lambda *_, made=made: made)
        found += noise.residuals([], "a", "b")
    means = [np.mean(rounds) for rounds in found]
    assert np.mean(means) == pytest.approx(0, abs=1e-4)
    assert np.std(means) == pytest.approx(math.hypot(between, within / math.sqrt(20)), rel=0.03)
    assert np.mean([np.std(rounds, ddof=1) for rounds in found]) == pytest.approx(within, rel=0.03)


def test_the_rate_of_shares_is_images_a_second_and_not_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = [{"images_per_second": rate} for rate in (900.0, 1000.0, 19_000.0, 20_000.0, 21_000.0)]
    document = {"train_images": 60_000, "train_cpu_seconds": 6.0, "shares": [170, 86]}
    printed = {"run": document, "show": {"epochs": epochs}}
    monkeypatch.setattr(shares, "run", lambda argv, core, threads: json.dumps(printed[argv[1]]))
    span = shares._trained(("ranks=1",), None)
    assert span.units / span.wall_seconds == pytest.approx(20_000), "of the second half, when shares are found"


def test_planted_causes_are_scored_by_first_name_and_size() -> None:
    found = score.notes(
        [
            planted_row("slow loader", 0.1, 0.11, "loader"),
            planted_row("slow loader", 0.2, 0.3, "loader"),
            planted_row("slow loader", 0.02, None),
            planted_row("nothing", 0.0, None),
            planted_row("nothing", 0.0, None, "turns"),
        ]
    )
    assert "are named first: 2 of 2 (goal 95%: met)" in found[0], "what is planted smaller has no goal"
    assert "within 20% of itself: 1 of 2 (goal 95%: missed)" in found[1]
    assert "nothing is planted: 1 of 2" in found[2]
    assert any("planted 20%" in note and "off by 50% of itself" in note for note in found)
    assert [score.GOAL in note for note in found] == [True] * 3 + [False] * (len(found) - 3)


def test_executions_of_planted_causes_go_on_where_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    done = []

    def execute(cause: causes.Cause, size: float) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((cause.name, size))
        return planted_row(cause.name, size, None)

    wanted = list(score.cells(2, ["slow loader"]))
    with pytest.raises(KeyboardInterrupt):
        score.execute(wanted, execute)
    done.clear()
    score.execute(wanted[:6], execute)
    assert done == [(cause.name, size) for cause, size in wanted[3:6]]


def test_causes_planted_in_scripts_are_scored_by_the_name_that_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever fails counts as not having named it; if that is Lockstep, the figures are not valid."""

    def ours(cause: suspects.Cause) -> dict[str, Any]:
        return {"cause": cause.name, "first": cause.named, "right": cause.name != "slow rank"}

    def theirs(cause: suspects.Cause) -> dict[str, Any]:
        raise ContenderFailed("exit code 1")

    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    monkeypatch.setattr(attach, "BOTH", (("Lockstep", ours), ("TraceML", theirs)))
    section = attach.measure(Settings())
    assert section.valid
    assert section.notes[0] == "Lockstep: 24 of 25 causes are named first (goal 24: met)."
    assert section.notes[1] == "Lockstep: nothing is named in 5 of 5 scripts in which nothing is planted."
    assert section.notes[2] == "TraceML: 0 of 25 causes are named first."
    monkeypatch.setattr(attach, "OURS", (("Lockstep", ours),))
    assert attach.measure_held_out(Settings()).notes[0] == "Lockstep: 19 of 19 causes are named first."
    monkeypatch.setattr(attach, "BOTH", (("Lockstep", theirs),))
    monkeypatch.setattr(parts, "FOLDER", tmp_path / "again")
    assert not attach.measure(Settings()).valid
