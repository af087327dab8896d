"""`import lockstep`: words and keywords, results that show themselves, and classes of a script without a guard. Real processes."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import lockstep
from lockstep.api.calls import _words
from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import Optimizer, Recipe, Regularize
from lockstep.report.inline import html, plain
from lockstep.report.views import Axis, Bar, Bars, Cell, Part, Said, Table
from lockstep.words import as_words, read_words
from support import Cli

SCRIPT = """
import json, math, multiprocessing
import torch as pt
from torch import nn
from torch.nn.functional import relu

import lockstep

WIDTH = 16
x = pt.ones(3)  # also an argument of forward, and not what is meant there
weights = pt.ones(10)


def activation(x):
    return relu(x) * math.sqrt(1.0)


class Base(nn.Module):
    def forward(self, x):
        return self.head(activation(self.body(x.flatten(1))))


class Net(Base):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(784, width), nn.Linear(width, 10)


class Scaled(Net):
    def forward(self, x):
        return super().forward(x) * weights


def message(**settings):
    try:
        lockstep.run(data="embedded", **settings)
    except lockstep.InputError as error:
        return str(error)


settings = dict(data="embedded", train_limit=96, test_limit=50, global_batch=48, threads=1, backend="gloo", quiet=True)
run = lockstep.run("epochs=3", lockstep.Placement(ranks=2), model=Net, model_args={"width": 8}, epochs=1, **settings)
errors = [message(model=Scaled), message(model=Net()), message(model=lambda: Net()), message(model=3), message(rank=2)]
explained = lockstep.explain(run)
print(json.dumps({
    "model": run.spec().recipe.model, "epochs": run.spec().recipe.epochs, "ranks": run.spec().placement.ranks, "id": run.id,
    "text": repr(run), "html": run._repr_html_(), "errors": errors, "explained": repr(explained), "findings": len(explained.findings),
}))
"""


def test_a_script_without_a_guard_trains_its_own_model(cli: Cli) -> None:
    """Were it imported by its ranks, each of them would start runs of its own."""
    (cli.folder / "mine.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(list(cli.runs.glob("*/run.json"))) == 1, "the ranks have not run the script again"
    assert (found["epochs"], found["ranks"]) == (1, 2), "keywords have the last word, then words, then objects"
    file, _, name = found["model"].rpartition(":")
    source = (cli.folder / file).read_text()
    assert name == "Net"
    assert Path(file).parent.name == "code"
    for line in (
        "import torch.nn as nn",
        "from torch.nn.functional import relu",
        "import math",
        "WIDTH = 16",
        "def activation(x):",
        "class Base(",
    ):
        assert line in source, line
    assert source.index("class Base(") < source.index("class Net(")
    assert "lockstep" not in source.split("\n", 1)[1]
    assert not re.search(r"^(x|weights) =", source, re.MULTILINE)

    scaled, an_object, a_lambda, a_number, unknown = found["errors"]
    assert "model=Scaled: it uses 'weights' of the notebook, which no file can hold (Tensor): make it inside" in scaled
    assert "model: give the class or function that makes it, not an object (Net)" in an_object
    assert "define it with def or class" in a_lambda
    assert "model=3" in a_number
    assert "unknown key 'rank': did you mean 'ranks'?" in unknown
    assert not any("\n" in text for text in found["errors"])

    assert found["text"].startswith(f"{found['id']}  done; test accuracy ")
    assert "\n" not in found["text"]
    assert found["findings"] >= 1
    assert "1. " in found["explained"]
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', found["html"])
    assert pictures
    for picture in pictures:
        ElementTree.fromstring(base64.b64decode(picture))
    assert "<script" not in found["html"]
    assert len(found["html"]) < 150_000


def test_keywords_are_the_words_of_the_command_line() -> None:
    words = as_words(
        {
            "data": "embedded",
            "seed": 7,
            "zero": True,
            "threads": None,
            "shares": [3, 1],
            "optimizer": Optimizer(lr=1e-7),
            "regularize": {"label_smoothing": 0.1},
            "model": "none",
            "schedule": {"name": "none"},
        }
    )
    assert {"data=embedded", "seed=7", "zero=true", "threads=none", "shares=[3, 1]", 'model="none"'} <= set(words)
    recipe, placement = read_words([*words[:7], *(word for word in words if word.startswith("optimizer."))])
    assert recipe.optimizer.lr == 1e-7
    assert placement.shares == [3, 1]
    with pytest.raises(
        InputError, match=r"data: expected a number, .* or the function or class that makes it, and got object"
    ):
        as_words({"data": object()})


def test_objects_say_what_they_said() -> None:
    recipe = Recipe(global_batch=48, regularize=Regularize(label_smoothing=0.1), model_args={"width": 3}, lr_batch=32)
    placement = Placement(ranks=4, hosts=2, emulated=True, link="1gbit,1ms")
    texts, base = _words((recipe, placement), {}, None)
    assert texts == ()
    assert read_words(texts, base) == (recipe, placement)


def test_what_cannot_be_read_says_so_instead_of_raising(tmp_path: Path) -> None:
    nothing = lockstep.Run(tmp_path / "nothing")
    assert "Run: " in repr(nothing)
    assert nothing._repr_html_() is None


def test_options_are_checked_in_one_line(tmp_path: Path) -> None:
    for call, message in (
        (lambda: lockstep.race("ranks=1", "ranks=2", budget="soon"), "budget: 'soon' is not a time, such as 1s."),
        (lambda: lockstep.race("ranks=1", "ranks=2", until=90), "until: 90 is out of range: from 0.01% to 50%."),
        (lambda: lockstep.race("ranks=1", runs=tmp_path), "race: name two or more contenders"),
        (lambda: lockstep.explain("last", runs=tmp_path), "no run"),
        (
            lambda: lockstep.explain(questions=["speed"]),
            "questions: there is no 'speed'; there are machine, step, speed-up",
        ),
        (lambda: lockstep.study("nothing", runs=tmp_path), "no study 'nothing' in "),
        (lambda: lockstep.verify(ranks=1, runs=tmp_path), "ranks=1: there is nothing to compare"),
        (lambda: lockstep.run(3), "int: give words such as 'ranks=2', a Recipe or a Placement"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError) as error:
            call()
        assert message in str(error.value)
        assert error.value._render_traceback_() == [f"InputError: {error.value}"]
    assert not list(tmp_path.iterdir()), "wrong input leaves nothing behind"


def test_nothing_from_outside_becomes_markup() -> None:
    hostile = '<img src=x onerror="alert(1)">\x1b[2J'
    bars = Bars("step", "s", hostile, hostile, Axis("time", "seconds"), ["data"], [Bar(hostile, [1.0])])
    table = Table("t", hostile, "", [hostile], [[Cell(hostile, notes=[hostile])]])
    said = Said(hostile, hostile, hostile, hostile)
    part = Part(
        hostile, "run", facts=[(hostile, hostile)], headlines=[said, said], notes=[hostile], table=table, charts=[bars]
    )
    text = html(part)
    assert "<img src=x" not in text
    assert 'onerror="' not in text
    assert "\x1b" not in text + plain(part)


@pytest.mark.slow
def test_a_user_of_the_types_is_checked_by_mypy(tmp_path: Path) -> None:
    good = (
        "import lockstep\n"
        "run: lockstep.Run = lockstep.run('published/d-mnist', lockstep.Placement(ranks=2), epochs=1)\n"
        "print(run.folder.name, (run.summary() or {})['test_accuracy'])\n"
        "for ratio in lockstep.race('ranks=1', run, budget=60).ratios:\n"
        "    print(ratio.contender.upper())\n"
        "print(lockstep.explain(run, measure=True).findings[0].verdict.upper(), lockstep.verify(ranks=2).proven)\n"
        "print([each.id for each in lockstep.study('mine').runs])\n"
    )
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text(
        "import lockstep\nlockstep.run(3)\nlockstep.race('a', 'b').nothing\nlockstep.train()\n"
    )
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*argv, "good.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([*argv, "bad.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("error:") == 3, done.stdout
