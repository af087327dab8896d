"""A user's own data set, and everything that can be wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.data import open_data, userdata
from lockstep.errors import InputError
from lockstep.plugins import is_spec, load_object

HEAD = """import numpy as np
X = np.zeros((6, 1, 4, 4), 'uint8')
Y = np.arange(6) % 3
ALL = dict(train_images=X, train_labels=Y, test_images=X[:2], test_labels=Y[:2])
"""


def _write(folder: Path, body: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(HEAD + f"def load():\n    {body}\n")
    return f"{path}:load"


@pytest.mark.parametrize(
    "body",
    [
        "return X, Y, X[:2], Y[:2]",
        "return [X, Y, X[:2], Y[:2]]",
        "return X, Y, X[:2], Y[:2], 3",
        "return dict(ALL, classes=['a', 'b', 'c'])",
        "return X[:, 0], Y.astype('uint8'), X[:2, 0], Y[:2].astype('int32')",
        "import torch; t = torch.from_numpy; return t(X), t(Y), t(X[:2]), t(Y[:2])",
        "return X[:, :, ::-1], Y, X[:2], Y[:2]",
    ],
)
def test_good_data_in_every_form(tmp_path: Path, body: str) -> None:
    data = open_data(_write(tmp_path, body), scratch=tmp_path / "scratch")
    assert data.shape == (1, 4, 4)
    assert data.classes == 3
    assert data.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.train_labels.dtype == np.uint8
    assert isinstance(data.train_images, np.memmap)
    assert data.folder.is_relative_to(tmp_path / "scratch")
    assert data.origin.startswith("your own: ")


def test_names_of_classes_and_more_classes_than_a_byte_holds(tmp_path: Path) -> None:
    given = "return dict(ALL, classes=['a', 'b', 'c'])"
    assert open_data(_write(tmp_path, given), scratch=tmp_path / "a").class_names == ("a", "b", "c")
    data = open_data(_write(tmp_path, "return X, Y, X, Y + 300", "many.py"), scratch=tmp_path / "b")
    assert (data.classes, data.test_labels.dtype) == (303, np.int64)


def test_another_set_in_the_same_scratch_is_made_anew(tmp_path: Path) -> None:
    assert open_data(_write(tmp_path, "return X, Y, X, Y"), scratch=tmp_path / "s").classes == 3
    assert open_data(_write(tmp_path, "return X, Y, X, Y, 7", "b.py"), scratch=tmp_path / "s").classes == 7


def test_without_scratch_it_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    assert open_data(_write(tmp_path, "return X, Y, X, Y")).classes == 3
    assert not cache.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "must return a mapping or a tuple .* and returned NoneType"),
        ("return X, Y", "returned 2 values"),
        ("return dict(train_images=X)", "without train_labels, test_images, test_labels"),
        (
            "return dict(ALL, clases=3)",
            "unknown keys clases",
        ),
        ("return X / 255, Y, X, Y", "train_images is float64; give uint8 from 0 to 255: .*astype"),
        ("return X.astype('int64'), Y, X, Y", "train_images is int64; give uint8"),
        ("return X, Y, X.reshape(6, 16), Y", r"test_images has shape \(6, 16\); give \(N, C, H, W\)"),
        ("return X.repeat(3, 1).transpose(0, 2, 3, 1), Y, X, Y", r"looks like \(N, H, W, C\)"),
        ("return X, Y[:5], X, Y", "6 train_images and 5 train_labels"),
        ("return X, Y, X, Y - 1", "test_labels has the negative label -1"),
        ("return X, Y * 1.0, X, Y", "train_labels is float64; give whole numbers"),
        ("return X, Y == 1, X, Y", "train_labels is bool"),
        ("return X, Y[:, None], X, Y", r"train_labels has shape \(6, 1\)"),
        ("return X, Y, X, Y, 2", "train_labels has label 2, but the classes are 0 to 1"),
        ("return X, Y, X, Y, 'three'", "'classes' must be a number above 0"),
        ("return X, Y, X, Y, True", "'classes' must be a number above 0"),
        ("return X[:0], Y[:0], X, Y", "train_images is empty"),
        ("return X, Y, X[:0], Y[:0]", "test_images is empty"),
        ("return X.tolist(), Y, X, Y", "train_images is list; give a numpy array or a tensor"),
        ("return X, Y, X[:, :, :3], Y", "train and test images differ in shape"),
        ("return X, Y + 10**9, X, Y", "state 'classes'"),
        ("raise KeyError('no\\n  such column')", r"raised KeyError: .*\(mine.py line 6\)"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        (
            "import no_such_module_at_all",
            "raised ModuleNotFoundError: No module named 'no_such_module_at_all'",
        ),
    ],
)
def test_bad_data_is_one_line_that_names_the_callable(tmp_path: Path, body: str, reason: str) -> None:
    spec = _write(tmp_path, body)
    with pytest.raises(InputError, match=reason) as caught:
        open_data(spec, scratch=tmp_path / "scratch")
    assert str(caught.value).startswith(f"data '{spec}'")
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("source", "attribute", "reason"),
    [
        ("import no_such_thing", "load", r"cannot import .*bad.py: ModuleNotFoundError: .*\(bad.py line 1\)"),
        ("def load(:\n    pass", "load", r"SyntaxError: .*\(bad.py line 1\)"),
        ("x = 1\nraise SystemExit('bye')", "load", r"SystemExit: bye \(bad.py line 2\)"),
        ("1 / 0", "load", "ZeroDivisionError: division by zero"),
        ("def loads(): pass", "load", "has no 'load'; did you mean 'loads'?"),
        ("load = 3", "load", "'load' is an int, not something that can be called"),
    ],
)
def test_import_failures_of_a_file(tmp_path: Path, source: str, attribute: str, reason: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(InputError, match=reason) as caught:
        load_object(f"{tmp_path / 'bad.py'}:{attribute}", "model")
    assert str(caught.value).startswith("model '")
    assert "\n" not in str(caught.value)


def test_import_failures_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lockstep_broken.py").write_text("import really_not_there\n")
    for spec, reason in (
        ("no_such_package_x:load", "no module named 'no_such_package_x' in"),
        ("no_such_package_x.y:load", "No module named 'no_such_package_x'"),
        (
            "lockstep_broken:load",
            "cannot import lockstep_broken: ModuleNotFoundError: No module named 'really_not_there'",
        ),
        ("nowhere/at_all.py:load", "there is no file"),
        ("json", "not of the form"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            load_object(spec, "data")
        assert "\n" not in str(caught.value)


def test_modules_in_the_current_folder_and_neighbours_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lockstep_own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sub.py").write_text("class Maker:\n    @staticmethod\n    def load():\n        return 5\n")
    (tmp_path / "lockstep_neighbour.py").write_text("value = 6\n")
    (tmp_path / "main.py").write_text(
        "from lockstep_neighbour import value\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Thing:\n    x: 'int' = value\n"
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "main.py").write_text("class Thing:\n    x = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("lockstep_own_package.sub:Maker.load", "model")() == 5
    assert load_object("main.py:Thing", "model")().x == 6
    assert load_object("other/main.py:Thing", "model")().x == 7
    assert load_object("main.py:Thing", "model") is load_object("./main.py:Thing", "model")


def test_form_of_a_spec() -> None:
    for good in ("a:b", "a.b.c:d", "x.py:f", "../x-y/z w.py:f", "/abs/x.py:A.b", "~/x.py:f"):
        assert is_spec(good)
    for bad in ("mnist", "a:", ":b", "a b:c", "x.py", "a:b c", "1a:b", "x.txt:f/g", "http://x.py", "a:1"):
        assert not is_spec(bad)


def test_a_long_strip_is_a_signal_of_many_channels_and_a_picture_is_told_its_order() -> None:
    signal = np.zeros((2, 12, 500, 1), np.uint8)
    assert userdata._images(signal, "x").shape == signal.shape
    for shape in ((2, 32, 32, 3), (2, 480, 640, 3), (2, 28, 28, 1)):
        with pytest.raises(InputError, match="looks like"):
            userdata._images(np.zeros(shape, np.uint8), "x")
