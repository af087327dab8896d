"""The answer, before any table: one sentence for each cell or contender against the baseline, in people's words; why; what to type next.

Only what is settled is stated. What is not is called so, with its interval. What holds for all cells alike is said once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lockstep.machine import starving
from lockstep.metrics import Kind, metric_of
from lockstep.report import alone
from lockstep.report.alone import ANSWER
from lockstep.report.setup import study_words
from lockstep.report.spoken import LONG, Name, names
from lockstep.report.subject import Subject
from lockstep.report.views import Said
from lockstep.study import reasons
from lockstep.study.gather import Group
from lockstep.text import listed
from lockstep.units import FEW, WIDE_POINTS, WIDE_RATIO, counted, digits

Document = dict[str, Any]
Way = Literal["more", "less", "same", "open"]
# Ratios nearer to 1 than this are said in per cent.
NEAR = 1.2
# A difference of speed that is worth a reason.
WORTH = 0.05
# More sentences than this are a table.
MOST = 12
SPEED = ("images_per_second", "seconds")
# Where a study that was starved is made anew.
ANEW = "runs-anew"
MEMORY = ("memory", "memory_of_a_rank", "tensor_memory")
NOUNS = {"accuracy": "accuracy", "memory": "memory", "memory_of_a_rank": "memory per rank"}


class Difference(NamedTuple):
    """One figure beside the baseline's: a ratio, or of accuracies a difference."""

    noun: str
    kind: Kind
    way: Way
    effect: float
    low: float | None
    high: float | None
    n: int
    of: str
    """What there are n of on each side: runs, starts, trainings."""

    @property
    def known(self) -> bool:
        """Whether its interval says anything: a few values hardly know their own spread."""
        if self.low is None or self.high is None:
            return False
        wide = self.high - self.low > WIDE_POINTS if self.kind == "accuracy" else self.high > WIDE_RATIO * self.low
        return self.n > FEW or not wide

    def inverse(self) -> Difference:
        """Of a time, how many times as fast."""
        turned: dict[Way, Way] = {"more": "less", "less": "more"}
        low, high = (1 / bound if bound else None for bound in (self.high, self.low))
        return self._replace(way=turned.get(self.way, self.way), effect=1 / self.effect, low=low, high=high)


def of_comparison(metric: str, against: Document | None, raced: bool) -> Difference | None:
    """From a comparison's document; None where there is nothing to say."""
    if not against or against["effect"] is None:
        return None
    figure, verdict = metric_of(metric), against["verdict"]
    none = 1.0 if figure.by_ratio else 0.0
    way: Way = "same" if verdict == "the same" else "more" if against["effect"] > none else "less"
    if verdict in ("not significant", "too few"):
        way = "open"
    noun = NOUNS.get(metric, figure.heading.removeprefix("test "))
    of = "run" if not raced else "training" if figure.learned else "start"
    return Difference(noun, figure.kind, way, against["effect"], against["low"], against["high"], against["n"], of)


def speed_of(found: Mapping[str, Difference]) -> Difference | None:
    if rate := found.get("images_per_second"):
        return rate
    return time.inverse() if (time := found.get("seconds")) else None


# ---------------------------------------------------------------- sentences


def sentence(who: Name, base: Name, speed: Difference | None, others: Sequence[Difference], verb: str = "train") -> str:
    """`verb`: what they do fast or slowly."""
    given = [*([speed] if speed else []), *others]
    seen_only = given and not any(each.way != "open" or each.known for each in given)
    return (unsettled if seen_only else settled)(who, base, speed, others, verb)


def unsettled(who: Name, base: Name, speed: Difference | None, others: Sequence[Difference], verb: str) -> str:
    """What one pair or a few have shown, where nothing can be stated."""
    seen = [_seen(each) for each in others]
    text = f"{who.begins()}: not settled; in {_few(speed or others[0])} of each "
    if not speed:
        return text + listed(seen)
    text += f"{'they' if who.several else 'it'} {_speed(speed, Verbs(PAST[verb], 'took'), _short(base))}"
    return text + (f", with {listed(seen)}" if seen else "")


def settled(who: Name, base: Name, speed: Difference | None, others: Sequence[Difference], verb: str) -> str:
    """What can be stated, and what is left open, with its interval."""
    s, than = "" if who.several else "s", _short(base)
    sure = [_clause(each, s) for each in others if each.way in ("more", "less")]
    same = [each.noun for each in others if each.way == "same"]
    open_ = [f"{each.noun} ({_between(each)})" for each in others if each.way == "open"]
    if speed and speed.way == "open":
        text = f"{who.begins()}: not settled, {_open_speed(speed, than)}"
        text += f"; {'they' if who.several else 'it'} {listed(sure)}" if sure else ""
        text += f"; the same {listed(same)}" if same else ""
    elif speed:
        text = f"{who.begins()} {listed([_speed(speed, Verbs(verb + s, f'take{s}'), than), *sure])}"
        text += f", with the same {listed(same)}" if same else ""
    elif sure:
        text = f"{who.begins()} {listed(sure)} against {than}" + (f", with the same {listed(same)}" if same else "")
    elif same:
        text = f"{who.begins()}: the same {listed(same)} as {than}"
    else:
        return f"{who.begins()}: not settled against {than}: {', '.join(open_)}"
    return text + (f"; not settled: {', '.join(open_)}" if open_ else "")


def _short(base: Name) -> str:
    return base.text if len(base.text) <= LONG else "the baseline"


class Verbs(NamedTuple):
    """Of speed, in the tense and number of a sentence."""

    does: str
    takes: str


PAST = {"train": "trained", "run": "ran"}


def _speed(speed: Difference, verbs: Verbs, than: str) -> str:
    if speed.way == "same" or f"{speed.effect:.3f}" == "1.000":
        return f"{verbs.does} as fast as {than}"
    if speed.effect > 1:
        near = speed.effect < NEAR
        faster = f"{_per_cent(speed)} % faster than" if near else f"{_times(speed)} times as fast as"
        return f"{verbs.does} {faster} {than}"
    slow = speed.inverse()
    near = slow.effect < NEAR
    longer = f"{_per_cent(slow)} % longer than" if near else f"{_times(slow)} times as long as"
    return f"{verbs.takes} {longer} {than}"


def _open_speed(speed: Difference, than: str) -> str:
    if speed.known:
        return f"{_between(speed)} as fast as {than}"
    return f"{_times(speed)} times as fast as {than} in {_few(speed)} of each"


def _clause(found: Difference, s: str) -> str:
    more, near = found.way == "more", found.effect < NEAR
    if found.kind == "accuracy":
        return f"{'gain' if more else 'lose'}{s} {_points(found.effect)} of {found.noun}"
    if found.kind == "size":
        if not more:
            return f"need{s} {_per_cent(found)} % less {found.noun}"
        return f"need{s} " + (
            f"{_per_cent(found)} % more {found.noun}" if near else f"{_times(found)} times the {found.noun}"
        )
    if not more:
        return f"end{s} with a {found.noun} {_per_cent(found)} % lower"
    return f"end{s} with a {found.noun} " + (
        f"{_per_cent(found)} % higher" if near else f"{_times(found)} times as high"
    )


def _seen(found: Difference) -> str:
    """What a pair or two have shown, and no more."""
    if found.kind == "accuracy":
        way = "more" if found.effect > 0 else "less"
        return f"{_points(found.effect)} {way} {found.noun}" if found.effect else f"the same {found.noun}"
    return f"{_times(found)} times the {found.noun}"


def _between(found: Difference) -> str:
    if not found.known:
        times = (
            f"{round(100 * found.effect, 1) or 0.0:+.1f} points"
            if found.kind == "accuracy"
            else f"{_times(found)} times"
        )
        return f"{times.replace('-', '−')} in {_few(found)} of each"
    assert found.low is not None
    assert found.high is not None
    if found.kind == "accuracy":
        low, high = (f"{100 * bound:+.1f}".replace("-", "−") for bound in (found.low, found.high))
        return f"between {low} and {high} points"
    places = 1 if found.high - found.low >= 0.3 else 2 if found.high - found.low >= 0.02 else 3
    return f"between {found.low:.{places}f} and {found.high:.{places}f} times"


def _few(found: Difference) -> str:
    return f"one {found.of}" if found.n == 1 else counted(found.n, found.of)


def _times(found: Difference) -> str:
    """As many digits as its interval bears."""
    sharp = found.low is not None and found.high is not None and found.high - found.low < 0.05 * found.effect
    return digits(found.effect, 3 if sharp else 2)


def _per_cent(found: Difference) -> str:
    share = 100 * abs(found.effect - 1)
    return f"{share:.0f}" if share >= 2 else f"{share:.1f}"


def _begun(text: str) -> str:
    return text[0].upper() + text[1:]


def _points(effect: float) -> str:
    text = digits(100 * abs(effect), 2)
    return f"{text} point" if text == "1" else f"{text} points"


# ---------------------------------------------------------------- runs and studies


def answers(subject: Subject) -> list[Said]:
    """What a comparison comes to, cell by cell, and what went wrong; of a single run, what it came to."""
    document = subject.comparison
    if subject.kind == "run":
        return alone.answers(subject.runs[0])
    told = _starved(document) + (_cells(subject, document) if document["baseline"] else [])
    for cell in document["cells"]:
        if cell["left_out"]:
            told.append(Said("left out", f"{cell['cell']} is left out", cell["left_out"]))
        if failed := cell["failed"]:
            more = f"; {counted(len(failed) - 1, 'more failure')}" if len(failed) > 1 else ""
            told.append(Said("failed", f"{cell['cell']} failed", failed[0] + more))
    return told


def _starved(document: Document) -> list[Said]:
    starved = document["stability"].get("starved")
    return [Said("machine", starved, starving.UNEQUAL, starving.ADVICE)] if starved else []


def _cells(subject: Subject, document: Document) -> list[Said]:
    groups = {group.name: group for group in subject.groups}
    base = groups[document["baseline"]]
    spoken = names(list(groups), base.name)
    raced = bool(document.get("race"))
    found = {
        cell["cell"]: {
            m: d for m, c in cell["metrics"].items() if (d := of_comparison(m, c.get("against_baseline"), raced))
        }
        for cell in document["cells"]
    }
    found = {name: figures for name, figures in found.items() if figures}
    for name, figures in found.items():
        if groups[name].spec.recipe.data != base.spec.recipe.data:  # accuracies on other data are no more and no less
            found[name] = {m: each for m, each in figures.items() if not metric_of(m).learned}
    metrics = document["metrics"]
    learned = [metric for metric in metrics if metric_of(metric).learned]
    # What is deployed is what counts, where that was tested too.
    aspects = ["deployed_accuracy"] if "deployed_accuracy" in learned else learned[:1]
    aspects += [metric for metric in metrics if metric in MEMORY][:1]
    common = {m: way for m in aspects if (way := _alike([figures.get(m) for figures in found.values()]))}
    told = []
    for name, figures in list(found.items())[:MOST]:
        speed = speed_of(figures)
        others = [figures[m] for m in aspects if m in figures and m not in common]
        if not speed and not others:
            continue  # what all have in common is said once, below
        starved = bool(document["stability"].get("starved"))
        text = (starving.BESIDE if speed and starved else "") + sentence(*spoken[name], speed, others)
        told.append(
            Said(
                ANSWER,
                text,
                _why(
                    groups[name],
                    base,
                    speed,
                    [figures[m] for m in aspects if m in figures and metric_of(m).learned],
                    starved,
                ),
            )
        )
    if len(found) > MOST:
        told.append(Said(ANSWER, f"{counted(len(found) - MOST, 'more cell')}: see the table"))
    told += [Said(ANSWER, text) for text in _said_once(common, found, spoken)]
    return _why_once(told)


def _alike(found: Sequence[Difference | None]) -> Way | None:
    """What can be said of all cells at once: all are the same as the baseline, or of none it is settled."""
    ways = {each.way for each in found if each}
    return ways.pop() if len(found) > 1 and None not in found and len(ways) == 1 and ways <= {"same", "open"} else None


def _said_once(
    common: Mapping[str, Way],
    found: Mapping[str, Mapping[str, Difference]],
    spoken: Mapping[str, tuple[Name, Name]],
) -> list[str]:
    figures, bases = next(iter(found.values()), {}), {_short(base) for _, base in spoken.values()}
    base = bases.pop() if len(bases) == 1 else "the baseline"
    same, open_ = ([figures[m].noun for m, found in common.items() if found == way] for way in ("same", "open"))
    told = [f"All have the same {listed(same)} as {base}"] if same else []
    return told + (
        [f"{_begun(listed(open_))} {'are' if len(open_) > 1 else 'is'} not settled for any of them"] if open_ else []
    )


def _why(cell: Group, base: Group, speed: Difference | None, learned: Sequence[Difference], starved: bool) -> str:
    found = []
    if speed and (speed.way in ("more", "less") or not speed.known) and abs(speed.effect - 1) > WORTH:
        found.append(reasons.of_speed(cell, base, speed.effect > 1, starved))
    if any(each.way in ("more", "less") for each in learned):
        found.append(reasons.of_learning(cell, base))
    return "; ".join(text for text in found if text)


def _why_once(told: list[Said]) -> list[Said]:
    """A reason that several share stands with the first of them."""
    seen: set[str] = set()
    found = []
    for said in told:
        found.append(Said(said.question, said.verdict, "" if said.why in seen else said.why, said.next))
        seen.add(said.why)
    return found


def next_step(subject: Subject, where: str = "", page: bool = False) -> str:
    """What to type now. `where`: words that say where the runs are, if not in the usual folder. `page`: a page is worth a word too."""
    document = subject.comparison
    if _to_repeat(subject):
        return _again(subject, where)
    if subject.kind == "run":
        return f"lockstep explain {subject.runs[0].id}{where} (where its time goes)"
    open_ = {
        metric
        for cell in document["cells"]
        for metric, column in cell["metrics"].items()
        if (column.get("against_baseline") or {}).get("verdict") in ("not significant", "too few")
    }
    if subject.study:
        return _next_of_study(subject, document, open_, where, page)
    ids = [group.done[0].run.id for group in subject.groups if group.done]
    own = any(group.spec.options.own_loop for group in subject.groups if group.done)
    if open_ & {*SPEED} and 1 < len(ids) <= FEW and not own:
        return f"lockstep race {' '.join(ids)}{where} (settles which is faster, in a minute)"
    return f"lockstep explain {ids[-1]}{where} (where its time goes)" if ids else ""


def _to_repeat(subject: Subject) -> bool:
    """Whether other work had the machine, and times are part of what was asked."""
    if subject.kind == "run":
        had = subject.runs[0].cores_had
        return had is not None and starving.starved(had)
    document = subject.comparison
    return bool(document["stability"].get("starved")) and any(metric_of(metric).timed for metric in document["metrics"])


def _again(subject: Subject, where: str) -> str:
    """What repeats the comparison. A study keeps what it has measured, so it is made anew in another folder."""
    if subject.study:
        study = subject.study.read().study
        words = study_words(subject.study.name, study.name, study.repeats)
        if words:
            return f"{' '.join(words)} --runs {ANEW} ({starving.AGAIN})"
        return f"{starving.ADVICE}, with --runs and a new folder: a study keeps what it has measured"
    ids = [group.done[0].run.id for group in subject.groups if group.done]
    if 1 < len(ids) <= FEW and not any(group.spec.options.own_loop for group in subject.groups if group.done):
        return f"lockstep race {' '.join(ids)}{where} ({starving.AGAIN})"
    return starving.ADVICE


def _next_of_study(subject: Subject, document: Document, open_: set[str], where: str, page: bool) -> str:
    assert subject.study is not None
    name, study = subject.study.name, subject.study.read().study
    trained = max(
        (column["n"] for c in document["cells"] for m, column in c["metrics"].items() if metric_of(m).learned),
        default=0,
    )
    going, more = (
        study_words(name, study.name, repeats) for repeats in (study.repeats, 2 * max(trained, study.repeats))
    )
    race, failed = document.get("race"), any(cell["failed"] for cell in document["cells"])
    done = sum(run.state == "done" for run in subject.runs)
    if going and ((race and not race["over"]) or done < document.get("runs_planned", 0)) and not failed:
        return f"{' '.join(going)}{where} (goes on with it)"
    if more and any(metric_of(metric).learned for metric in open_):
        return f"{' '.join(more)}{where} (more seeds, to settle what is open)"
    shown = f"; lockstep report {name}{where} -o {name}.html (all of it as a page)" if page else ""
    return f"lockstep explain {name}{where} (why, cell by cell){shown}"
