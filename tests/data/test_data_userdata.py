"""A user's own data set, and everything that can be wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.data import DataSet, open_data, userdata
from lockstep.errors import InputError
from lockstep.plugins import is_spec, load_object

HEAD = """import numpy as np
X = np.zeros((6, 1, 4, 4), 'uint8')
Y = np.arange(6) % 3
ALL = dict(train_images=X, train_labels=Y, test_images=X[:2], test_labels=Y[:2])
T = np.arange(36).reshape(6, 6) % 6

class Items:
    def __init__(self, x, y, fails=False):
        self.x, self.y, self.fails = x, y, fails
    def __len__(self):
        return len(self.y)
    def __getitem__(self, i):
        if self.fails and i == 3:
            raise ValueError("no such file")
        return self.x[i], self.y[i]

class Stream:
    def __iter__(self):
        return iter([(X[i], Y[i]) for i in range(4)])

class Counted(Stream):
    def __init__(self, count=4):
        self.count = count
    def __len__(self):
        return self.count
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


TORCH = "import torch; from torch.utils.data import DataLoader, IterableDataset, TensorDataset; t = torch.from_numpy; "


@pytest.mark.parametrize(
    "body",
    [
        "return (X, Y), (X[:2], Y[:2])",
        "return dict(train=Items(X, Y), test=Counted())",
        TORCH + "return TensorDataset(t(X), t(Y)), TensorDataset(t(X[:2]), t(Y[:2]))",
        TORCH
        + "d = TensorDataset(t(X), t(Y)); return DataLoader(d, 2, shuffle=True), DataLoader(d, 3, drop_last=True)",
        TORCH + "f = lambda items: (torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])); "
        "d = TensorDataset(t(X), t(Y)); return DataLoader(d, collate_fn=f), d",
        TORCH + "S = type('S', (Counted, IterableDataset), {}); return S(), S()",
    ],
)
def test_datasets_and_loaders_are_laid_down_as_arrays(
    tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = open_data(_write(tmp_path, body), scratch=tmp_path / "scratch")
    assert data.is_images
    assert isinstance(data.train_images, np.memmap)
    assert data.train_labels.tolist() == [0, 1, 2, 0, 1, 2][: len(data.train_labels)]
    assert data.classes == 3
    assert ("global_batch, shuffle and seed say" in capsys.readouterr().err) == ("DataLoader(" in body)


SAMPLERS = (
    TORCH
    + "from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler; "
    "Own = lambda pick, *given: type('Own', (BatchSampler,), {{'__iter__': pick}})(*given); "
    "d = TensorDataset(t(X + np.arange(6, dtype='uint8')[:, None, None, None]), t(Y)); "
    "return DataLoader(d, {}), DataLoader(d, 2, sampler=SubsetRandomSampler([5, 4]))"
)


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ("2, sampler=SubsetRandomSampler([3, 0, 1])", [0, 1, 3]),
        ("batch_sampler=BatchSampler(SubsetRandomSampler([3, 1]), 2, True)", [1, 3]),
        ("batch_sampler=[[3, 0], [2]]", [0, 2, 3]),
        ("batch_sampler=BatchSampler(range(6), 4, True)", [0, 1, 2, 3, 4, 5]),
        ("batch_sampler=Own(lambda s: iter([[4, 2], [0]]), range(6), 2, False)", [0, 2, 4]),
        ("2, sampler=RandomSampler(d)", [0, 1, 2, 3, 4, 5]),
        ("2, sampler=DistributedSampler(d, 2, 0)", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_samples_that_a_sampler_picks(tmp_path: Path, options: str, taken: list[int]) -> None:
    data = open_data(_write(tmp_path, SAMPLERS.format(options)), scratch=tmp_path / "scratch")
    assert data.train_images[:, 0, 0, 0].tolist() == taken
    assert data.test_images[:, 0, 0, 0].tolist() == [4, 5]


@pytest.mark.parametrize(
    "options",
    [
        "2, sampler=WeightedRandomSampler([1.0] * 6, 6)",
        "2, sampler=RandomSampler(d, replacement=True)",
        "batch_sampler=[[3, 0], [3]]",
        "batch_sampler=Own(lambda s: iter([[3, 3], [0, 1]]), range(6), 2, False)",
        "2, sampler=type('Part', (), dict(i=0, __iter__=lambda s: (setattr(s, 'i', s.i + 1), iter([s.i]))[1]))()",
    ],
    ids=["weighted", "replacement", "twice", "oversampled", "other samples in every epoch"],
)
def test_a_sampler_that_picks_no_set_of_samples_is_refused(tmp_path: Path, options: str) -> None:
    with pytest.raises(
        InputError, match=r"train: its .* takes samples more than once, or others in every epoch"
    ) as caught:
        open_data(_write(tmp_path, SAMPLERS.format(options)), scratch=tmp_path / "scratch")
    assert "\n" not in str(caught.value)


# Samples that are others each time, and a set of which each is always the same.
CHANCE = (
    TORCH + "R = type('R', (Items,), dict(__getitem__=lambda s, i: (np.random.rand(3), Y[i]))); "
    "Walked = type('Walked', (R,), dict(__iter__=lambda s: map(s.__getitem__, range(6)))); "
    "Stream = type('Stream', (IterableDataset,), dict(__len__=lambda s: 6, __iter__=lambda s: ((np.random.rand(3), y) for y in Y))); "
    "same = Items(X[:, 0, 0, :3] / 2, Y); "
    "f = lambda items: (np.stack([x for x, _ in items]), np.stack([y for _, y in items])); "
    "masked = lambda items: (np.random.rand(len(items), 3), f(items)[1]); "
)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("R(X, Y)", True),
        ("Walked(X, Y)", True),
        ("DataLoader(R(X, Y), 2)", True),
        ("DataLoader(R(X, Y), 2, collate_fn=f)", True),
        ("DataLoader(R(X, Y), 2, sampler=[4, 1], collate_fn=f)", True),
        ("DataLoader(same, 2, collate_fn=masked)", True),
        ("DataLoader(same, 2, collate_fn=f)", False),
        ("same", False),
        ("Stream()", False),
    ],
)
def test_random_transforms_are_frozen_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train: str, said: bool
) -> None:
    """Of a Dataset, also one that can be iterated over, as Hugging Face's can, and of a collate_fn; not of what can only be iterated over."""
    open_data(_write(tmp_path, f"{CHANCE}return {train}, same"), scratch=tmp_path / "scratch")
    heard = capsys.readouterr().err
    assert heard.count("train: a sample is another one each time it is read") == said
    assert "test: " not in heard


def test_bfloat16_which_numpy_does_not_have(tmp_path: Path) -> None:
    x = "x = torch.full((6, 3), 0.5, dtype=torch.bfloat16); "
    body = TORCH + x + "return dict(train=(x, Y), test=TensorDataset(x, t(Y)))"
    data = open_data(_write(tmp_path, body), scratch=tmp_path / "scratch")
    assert (data.train_images.dtype.name, float(data.test_images[0, 0])) == ("float32", 0.5)


def test_inputs_of_every_kind(tmp_path: Path) -> None:
    """What is no image stays as it is: type, shape, names and all."""

    def opened(body: str, name: str) -> DataSet:
        return open_data(_write(tmp_path, body, f"{name}.py"), scratch=tmp_path / name)

    several = opened("return dict(train=((X / 2, T), Y), test=((X / 2, T), Y), class_weights=[1, 2, 3])", "several")
    assert [one.dtype.name for one in (several.train_images, *several.train_more)] == ["float64", "int64"]
    assert (several.keys, several.class_weights, several.is_images) == ((), (1.0, 2.0, 3.0), False)
    named = opened("return dict(train=dict(a=X, b=T, labels=Y), test=dict(a=X, b=T, labels=Y))", "named")
    assert (named.keys, named.train_more[0].shape) == (("a", "b"), (6, 6))
    tokens = opened("return T.astype('uint16'), T.astype('uint16')", "tokens")
    assert (tokens.train_images.dtype.name, tokens.train_images.shape, tokens.classes) == ("int32", (6, 5), 6)
    assert np.array_equal(tokens.train_labels[:, :-1], tokens.train_images[:, 1:])
    padded = opened("P = np.where(T > 3, -100, T); return (T, P), (T, P)", "padded")
    assert padded.train_labels.min() == -100
    numbers = opened(
        "return X[:, 0, 0].astype('float32'), X[:, 0] / 3, X[:, 0, 0].astype('float32'), X[:, 0] / 3", "numbers"
    )
    assert (numbers.shape, numbers.train_labels.shape, numbers.classes, numbers.mean) == ((4,), (6, 4, 4), 0, ())
    several_hot = opened("return X, T > 2, X, T > 2", "several_hot")
    assert (several_hot.train_labels.dtype.name, several_hot.classes) == ("uint8", 2)


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
        ("return X, Y", "train has no targets: give .* sequences of tokens"),
        ("return X, Y, X", "returned 3 values"),
        ("return dict(train_images=X)", "without train_labels, test_images, test_labels"),
        (
            "return dict(ALL, clases=3)",
            "unknown keys clases",
        ),
        ("return X.astype(str), Y, X, Y", "train_images is <U3; give numbers"),
        ("return X, Y, X.reshape(6, 16), Y", r"train and test images differ in shape: \(1, 4, 4\) and \(16,\)"),
        ("return X.repeat(3, 1).transpose(0, 2, 3, 1), Y, X, Y", r"looks like \(N, H, W, C\)"),
        ("return X, Y[:5], X, Y", "6 train_images and 5 train_labels"),
        ("return X, Y, X, Y - 1", "test_labels has the negative label -1"),
        ("return X, Y * 1.0, X, Y", "train and test labels differ in type: float64 and int64"),
        ("return X, Y * np.nan, X, Y * 1.0", "train_labels has 6 values that are not finite"),
        ("return X, Y[:, None], X, Y", r"train and test labels differ in shape: \(1,\) and \(\)"),
        ("return X, Y * 1.0, X, Y * 1.0, 3", "'classes' is stated, but train_labels is float64"),
        ("return dict(ALL, class_weights=[1, 2])", "2 class_weights for 3 classes"),
        ("return dict(ALL, class_weights=[1, -2, 1])", "'class_weights' must be numbers from 0 on"),
        ("return dict(ALL, class_weights=3)", "'class_weights' must be a list of numbers"),
        ("return dict(train=(T, T), test=(T, T), classes=3)", "train_labels has token 5, but the classes are 0 to 2"),
        ("return dict(train=X)", "without test"),
        ("return X, X", "train has no targets"),
        ("return Items(X, Y), 3", "test is int"),
        ("return dict(train=dict(a=X), test=dict(a=X))", "train is a mapping without 'labels'"),
        ("return (X, T), ((X, X), T)", "train and test have different inputs"),
        ("return Items(X, Y), Items(X, Y[:0])", "test is empty"),
        (
            "return Items(X, [1, 2.5]), Items(X, Y)",
            "sample 1 is float64 .*, and sample 0 int64 .*: all samples must be alike; pad",
        ),
        (
            "return Items([X[0], X[0, :, :2]], Y), Items(X, Y)",
            r"sample 1 is uint8 \(1, 2, 4\), and sample 0 uint8 \(1, 4, 4\)",
        ),
        ("return Items(X, [object()] * 6), Items(X, Y)", "sample 0: object cannot become an array"),
        ("return Items(X, Y, fails=True), Items(X, Y)", "sample 3 raised ValueError: no such file"),
        ("return Stream(), Items(X, Y)", "train is Stream without a length: give it __len__"),
        ("return Counted(5), Items(X, Y)", "train has the length 5 and gave 4 samples"),
        ("return X, Y, X, Y, 2", "train_labels has label 2, but the classes are 0 to 1"),
        ("return X, Y, X, Y, 'three'", "'classes' must be a number above 0"),
        ("return X, Y, X, Y, True", "'classes' must be a number above 0"),
        ("return X[:0], Y[:0], X, Y", "train_images is empty"),
        ("return X, Y, X[:0], Y[:0]", "test_images is empty"),
        ("return X.tolist(), Y, X, Y", "train_images is list; give a numpy array or a tensor"),
        ("return X, Y, X[:, :, :3], Y", "train and test images differ in shape"),
        ("return X, Y + 10**9, X, Y", "state 'classes'"),
        ("raise KeyError('no\\n  such column')", r"raised KeyError: .*\(mine.py line 27\)"),
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
