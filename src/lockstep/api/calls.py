"""The functions of `import lockstep`. Each takes the words of the command of its name, as words and as keywords, and raises errors of one line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.api.results import Explanation, Proof, RaceResult, Run, StudyResult
from lockstep.api.source import named
from lockstep.errors import InputError
from lockstep.launch.api import requested, train
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.report.progress import ProbeLine, ProgressLine, RaceLive, StatusLine
from lockstep.run import Run as RunFolder
from lockstep.run import runs_root
from lockstep.settings import checked, dotted
from lockstep.words import SECONDS, SHARE, Quantity, as_words, read_words

Word = str | Path | Recipe | Placement
Place = str | Path | None


def run(
    *words: Word,
    runs: Place = None,
    name: str | None = None,
    data_root: Place = None,
    resume: str | RunFolder | None = None,
    time_limit_s: float | None = None,
    checkpoint_every: int | None = None,
    checkpoint_steps: int | None = None,
    keep_checkpoints: int = 2,
    trace: int | None = None,
    profile: int | None = None,
    save_model: bool = True,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train a recipe on a placement, in processes of its own, and return the finished run (docs/python.md).

    >>> import lockstep
    >>> lockstep.run("published/d-mnist", ranks=2, epochs=1)  # doctest: +SKIP
    >>> lockstep.run(lockstep.Recipe(global_batch=256), lockstep.Placement(ranks=2))  # doctest: +SKIP
    """
    place = _path(runs)
    texts, base = _words(words, settings, place)
    recipe, placement, options = requested(
        texts,
        base,
        _run(resume, place) if resume else None,
        data_root=_absolute(data_root),
        time_limit_s=time_limit_s,
        checkpoint_every=checkpoint_every,
        checkpoint_steps=checkpoint_steps,
        keep_checkpoints=keep_checkpoints,
        trace=trace,
        profile=profile,
        save_model=save_model,
    )
    with ProgressLine() as line:  # warnings are said to the quiet, too
        shown = None if quiet else line
        found = train(recipe, placement, options, runs=place, name=name, tell=line.say, quiet=quiet, progress=shown)
    return Run(found.folder)


def race(
    *contenders: str | RunFolder,
    budget: str | float = "60s",
    until: str | float = "2%",
    name: str | None = None,
    runs: Place = None,
    data_root: Place = None,
    quiet: bool = False,
    **settings: Any,
) -> RaceResult:
    """Find out which of several placements or recipes is fastest. Keywords hold for all contenders (docs/race.md).

    >>> import lockstep
    >>> lockstep.race("ranks=1 threads=2", "ranks=2", global_batch=256)  # doctest: +SKIP
    """
    from lockstep.errors import RunFailed
    from lockstep.report.race import lost
    from lockstep.turns import Budget
    from lockstep.turns.hold import hold

    place = _path(runs)
    texts = [_contender(each, place) if isinstance(each, RunFolder) else each for each in contenders]
    common = shlex.join(_words((), settings, place)[0])
    chosen = Budget(seconds=_quantity("budget", budget, SECONDS), margin=_quantity("until", until, SHARE))
    folder, record = hold(
        texts, common, chosen, place, name, _absolute(data_root), lambda begun: RaceLive(begun, quiet=quiet)
    )
    if not record.ratios:
        raise RunFailed(f"race: {lost(record)}; what was measured is in {folder.path}")
    return RaceResult(folder)


def explain(
    run: str | RunFolder | StudyResult = "last",
    *,
    measure: bool = False,
    questions: Sequence[str] = (),
    accuracy: float | None = None,
    seconds: float = 12.0,
    runs: Place = None,
    quiet: bool = False,
) -> Explanation:
    """Say where the time of a run or study went, and what to do next (docs/explain.md).

    `measure`: start its ranks again for some seconds, to measure what its records cannot tell.

    >>> import lockstep
    >>> lockstep.explain("last", measure=True)  # doctest: +SKIP
    """
    from lockstep.explain import analyzers
    from lockstep.explain.asked import asked, measure_beside

    known = [each.name for each in analyzers()]
    if unknown := [question for question in questions if question not in known]:
        raise InputError(f"questions: there is no '{unknown[0]}'; there are {', '.join(known)}")
    if measure and not 1 <= seconds <= 600:
        raise InputError(f"seconds={seconds}: give it 1 to 600")
    with StatusLine(quiet) as line:
        found = asked(run if isinstance(run, str) else str(run.folder), _path(runs), line.say)
    if measure:
        for each in found.runs.values():
            with ProbeLine(f"measuring {each.id}", quiet) as probe:
                measure_beside(each, seconds, probe.say, probe)
    return Explanation(list(found.explained(tuple(questions), accuracy)), found.most)


def verify(*words: Word, runs: Place = None, data_root: Place = None, quiet: bool = False, **settings: Any) -> Proof:
    """Prove that N ranks compute what one process computes; two ranks, unless stated (docs/verify.md).

    >>> import lockstep
    >>> assert lockstep.verify(ranks=2).proven  # doctest: +SKIP
    """
    from lockstep.verify.begin import check, short_runs
    from lockstep.verify.prove import verify as prove
    from lockstep.verify.verified import record

    place = _path(runs)
    texts, base = _words(words, settings, place)
    recipe, placement = read_words(texts, {"ranks": 2, **base})
    expected = check(recipe, placement)
    with short_runs(place) as folder, StatusLine(quiet) as line:
        if expected:
            line.say(expected)
        verdict = prove(recipe, placement, folder, _absolute(data_root), tell=line.show)
        if verdict.proven:
            record(folder.parent, verdict.proven_specs, len(verdict.checks), verdict.steps)
    return Proof(verdict)


def study(name: str | Path, *, runs: Place = None) -> StudyResult:
    """A study that was run: by its name, its folder, or a packed file, which is unpacked into the folder of runs (docs/studies.md).

    >>> import lockstep
    >>> lockstep.study("batch-size.study.zip")  # doctest: +SKIP
    """
    from lockstep.study.folder import StudyFolder
    from lockstep.study.unpack import unpack

    place = _path(runs)
    if str(name).endswith(".zip"):
        return StudyResult(StudyFolder(Path(unpack(Path(name), place).folder)))
    found = StudyFolder.find(str(name), place)
    if found is None:
        raise InputError(f"no study '{name}' in {runs_root(place)}: run it first, lockstep study run {name}")
    return StudyResult(found)


def _words(
    words: Sequence[Word], settings: Mapping[str, Any], runs: Path | None
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Words and keywords as the words of a command line; and recipes and placements as settings that the words may change."""
    texts: list[str] = []
    base: dict[str, Any] = {}
    for word in words:
        if isinstance(word, Recipe | Placement):
            base |= dotted(checked(word))
        elif isinstance(word, str | Path):
            texts.append(str(word))
        else:
            raise InputError(f"{type(word).__name__}: give words such as 'ranks=2', a Recipe or a Placement")
    return (*(text for text in texts if text != "--"), *as_words(_named(settings, runs))), base


def _named(settings: Mapping[str, Any], runs: Path | None) -> dict[str, Any]:
    """Classes and functions by the names under which ranks import them."""

    def name(key: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [name(key, each) for each in value]
        return named(key, value, runs) if callable(value) else value

    return {key: name(key, value) for key, value in settings.items()}


def _quantity(option: str, value: str | float, quantity: Quantity) -> float:
    try:
        return quantity.read(value)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None


def _run(run: str | RunFolder, runs: Path | None) -> RunFolder:
    return run if isinstance(run, RunFolder) else RunFolder.find(run, runs_root(runs))


def _contender(run: RunFolder, runs: Path | None) -> str:
    """A run by its id, where that is enough to find it."""
    beside = (runs_root(runs) / run.id).absolute() == run.folder.absolute()
    return run.id if beside else shlex.quote(str(run.folder))


def _path(place: Place) -> Path | None:
    return Path(place) if place else None


def _absolute(place: Place) -> str | None:
    return str(Path(place).absolute()) if place else None
