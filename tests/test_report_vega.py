"""The plots: what stands in a picture is measured in its SVG, dot by dot, against the numbers that it was drawn from."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from lockstep.report.vega import bundle
from lockstep.report.vega.common import from_zero, palette
from lockstep.report.vega.files import png, svg
from lockstep.report.vega.spec import for_page, spec, with_data
from lockstep.report.views import (
    AnyChart,
    Axis,
    Bar,
    Bars,
    Dot,
    Fall,
    Lane,
    Lines,
    Mark,
    Point,
    Points,
    Scatter,
    Series,
    Span,
    Timeline,
    Waterfall,
)

SECONDS, NUMBER = Axis(label="time", unit="seconds"), Axis(label="loss")
HEAD = {"id": "a", "section": "speed", "title": "A title", "says": "Words."}
HOSTILE = '</svg><script>alert(1)</script> & "quoted" [datum.x] \\ ünï'


class Picture:
    """An SVG as it was drawn: marks by kind, texts by role."""

    def __init__(self, chart: AnyChart) -> None:
        self.text = svg(chart)
        self.tree = ElementTree.fromstring(self.text)
        self.parents = {child: parent for parent in self.tree.iter() for child in parent}

    def marks(self, kind: str, tag: str = "path") -> list[ElementTree.Element]:
        """Of all layers, in their order."""
        groups = [g for g in self.tree.iter() if {f"mark-{kind}", "role-mark"} <= set(g.get("class", "").split())]
        return [node for group in groups for node in group if node.tag.endswith(tag)]

    def texts(self, role: str = "") -> list[str]:
        groups = [g for g in self.tree.iter() if role in g.get("class", "")]
        return [node.text or "" for group in groups for node in group.iter() if node.tag.endswith("text")]

    def labels(self, axis: int) -> list[str]:
        """What stands at an axis: 0 is below, 1 beside."""
        groups = [g for g in self.tree.iter() if "role-axis-label" in g.get("class", "")]
        return [node.text or "" for node in groups[axis].iter() if node.tag.endswith("text") and shown(node)]


def shown(node: ElementTree.Element) -> bool:
    return node.get("opacity") != "0" and "opacity: 0" not in node.get("style", "")


def numbers(text: str | None) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text or "")]


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    found = numbers(path.get("d"))
    return list(zip(found[::2], found[1::2], strict=True))


def box(path: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, width, height of a bar."""
    x, y, wide, high = numbers(path.get("d"))[:4]
    return x, y, wide, high


def line_chart(*series: Series, x: Axis = NUMBER, y: Axis = NUMBER, **more: Any) -> Lines:
    return Lines(**HEAD, x=x, y=y, series=list(series), **more)


def test_points_of_a_line_lie_where_their_values_say() -> None:
    picture = Picture(line_chart(Series(name="one", colour="c0", x=[0, 1, 4], y=[2.0, 3.0, 7.0])))
    (path,) = picture.marks("line")
    (x0, y0), (x1, y1), (x2, y2) = corners(path)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 4, abs=1e-3)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(1 / 5, abs=1e-3)
    assert y2 < y0, "more is higher"
    assert len(picture.marks("symbol")) == 3, "few points are marked"


def test_powers_lie_equally_far_apart_on_a_logarithmic_axis() -> None:
    size = Axis(label="message", unit="binary", log=True)
    time = Axis(label="time", unit="seconds", log=True)
    one = Series(
        name="gloo", colour="c0", x=[4, 1 << 10, 1 << 18], y=[1e-5, 1e-4, 1e-3], low=[5e-6] * 3, high=[2e-3] * 3
    )
    picture = Picture(line_chart(one, x=size, y=time))
    (path,) = picture.marks("line")
    (x0, y0), (x1, y1), (x2, y2) = corners(path)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.01)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.01)
    assert picture.labels(0) == ["4 B", "32 B", "256 B", "2 KiB", "16 KiB", "128 KiB"]
    assert picture.labels(1) == ["10 µs", "100 µs", "1 ms"]
    assert len(picture.marks("area")) == 1, "its band"


def test_a_gap_in_the_numbers_is_a_gap_in_the_line() -> None:
    picture = Picture(line_chart(Series(name="one", colour="c0", x=[1, 2, 3, 4, 5], y=[1.0, 2.0, None, 2.0, 1.0])))
    (path,) = picture.marks("line")
    assert (path.get("d") or "").count("M") == 2


def test_what_is_switched_off_is_not_drawn_and_takes_no_room() -> None:
    low = Series(name="low", colour="c0", x=[1, 2], y=[0.0, 1.0])
    high = Series(name="high", colour="c1", x=[1, 2], y=[0.0, 1000.0], role="ranks")
    alone, both = Picture(line_chart(low, high, hidden=["ranks"])), Picture(line_chart(low, high))
    assert [len(each.marks("line")) for each in (alone, both)] == [1, 2]
    assert float(alone.labels(1)[-1]) <= 1
    assert both.labels(1)[-1] == "1,000"
    assert "high" not in alone.texts("role-legend-label")
    off = line_chart(low, msgspec.structs.replace(high, role="", shown=False))
    assert len(Picture(off).marks("line")) == 1


def test_intervals_of_named_points_are_bars_beside_each_other() -> None:
    ends: dict[str, Any] = {"low": [None, 1.5], "high": [None, 2.5], "texts": ["base", "more"]}
    series = [Series(name=name, colour=name, x=[1, 2], y=[1.0, 2.0], **ends) for name in ("c0", "c1")]
    picture = Picture(line_chart(*series, y=Axis(label="speed-up", unit="times")))
    bars = [rule for rule in picture.marks("rule", "line") if shown(rule)]
    starts = [numbers(rule.get("transform"))[0] for rule in bars]
    assert len(starts) == 2
    assert starts[1] - starts[0] == pytest.approx(8)
    high = [abs(float(rule.get("y2") or 0)) for rule in bars]
    point = [numbers(node.get("transform"))[1] for node in picture.marks("symbol")]
    assert high == pytest.approx([point[0] - point[1]] * 2, rel=1e-3), "one, which is what lies between the points too"


def test_a_marked_place_has_its_words_within_the_picture() -> None:
    one = Series(name="one", colour="c0", x=list(range(1, 21)), y=[1.0 / x for x in range(1, 21)])
    marks = [Mark(x=1, text="begins here, and says so at length", colour="warn"), Mark(x=20, text="ends here")]
    picture = Picture(line_chart(one, x=Axis(label="epoch", unit="count"), marks=marks))
    assert {mark.text for mark in marks} <= set(picture.texts("mark-text"))
    anchors = {node.text: node.get("text-anchor") for node in picture.marks("text", "text")}
    assert anchors == {marks[0].text: "start", marks[1].text: "end"}


def test_bars_are_as_long_as_their_values_and_stand_one_after_the_other() -> None:
    rows = [Bar(name="rank 0", values=[1e-3, 3e-3, 0.0]), Bar(name="rank 1", values=[2e-3, 2e-3, 4e-3], role="ranks")]
    chart = Bars(**HEAD, x=SECONDS, parts=["data", "forward", "exchange"], rows=rows)
    picture = Picture(chart)
    bars = [box(path) for path in picture.marks("rect")]
    assert len(bars) == 5, "nothing for what took no time"
    assert [wide / bars[0][2] for _, _, wide, _ in bars] == pytest.approx([1, 3, 2, 2, 4], rel=1e-3)
    assert [left / bars[0][2] for left, _, _, _ in bars] == pytest.approx([0, 1, 0, 2, 4], abs=1e-3)
    assert {top for _, top, _, _ in bars[:2]} != {top for _, top, _, _ in bars[2:]}
    words = picture.texts("mark-text")
    assert {"25 %", "75 %", "50 %", "4.00 ms", "8.00 ms"} <= set(words)
    assert len(Picture(msgspec.structs.replace(chart, hidden=["ranks"])).marks("rect")) == 2


def test_a_waterfall_begins_where_the_one_before_ended() -> None:
    rows = [
        Fall(name="ideal", value=8e-3, total=True, text="8.00 ms"),
        Fall(name="exchange", value=4e-3, text="+4.00 ms"),
        Fall(name="rest", value=-2e-3, text="-2.00 ms"),
        Fall(name="measured", value=10e-3, total=True, text="10.0 ms"),
    ]
    picture = Picture(Waterfall(**HEAD, x=SECONDS, rows=rows))
    bars = [box(path) for path in picture.marks("rect")]
    unit = bars[0][2] / 8
    ends = [sorted((left / unit, (left + wide) / unit)) for left, _, wide, _ in bars]
    assert [each for pair in ends for each in pair] == pytest.approx([0, 8, 8, 12, 10, 12, 0, 10], abs=1e-2)
    assert {row.text for row in rows} <= set(picture.texts("mark-text"))
    assert {"time of a step", "adds to it", "saves"} == set(picture.texts("role-legend-label"))


def test_the_area_of_a_circle_is_its_measure() -> None:
    dots = [Dot(name=f"cell {size}", colour="c0", x=size, y=0.5 + size / 100, size=size) for size in (10.0, 20.0, 40.0)]
    chart = Scatter(**HEAD, x=SECONDS, y=Axis(label="accuracy", unit="percent"), size=Axis(label="memory"), dots=dots)
    picture = Picture(chart)
    circles = [(numbers(node.get("transform"))[0], numbers(node.get("d"))[0]) for node in picture.marks("symbol")]
    radii = [radius for _, radius in sorted(circles)]
    assert [(radius / radii[0]) ** 2 for radius in radii] == pytest.approx([1, 2, 4], rel=1e-3)
    places = [x for x, _ in sorted(circles)]
    assert (places[1] - places[0]) / (places[2] - places[0]) == pytest.approx(1 / 3, abs=1e-3)
    assert {dot.name for dot in dots} == set(picture.texts("role-legend-label"))


def test_values_by_name_have_their_intervals_and_those_without_one_have_a_place_too() -> None:
    rows = [
        Point(name="one", colour="c0", value=2.0, low=1.0, high=4.0, text="2.00 s"),
        Point(name="other", colour="c1", value=3.0, text="3.00 s"),
    ]
    picture = Picture(Points(**HEAD, x=SECONDS, rows=rows))
    first, second = (numbers(node.get("transform"))[0] for node in picture.marks("symbol"))
    long, none = (float(rule.get("x2") or 0) for rule in picture.marks("rule", "line"))
    assert long == pytest.approx(3 * (second - first), rel=1e-3)
    assert none == 0
    assert picture.labels(0)[0] == "0.0", "they differ much, so their axis begins at zero"
    assert {"2.00 s", "3.00 s", "one", "other"} <= set(picture.texts())


@pytest.mark.parametrize(("values", "begins"), [([90.0, 91.0], False), ([1.0, 3.0], True), ([-1.0, 3.0], False)])
def test_an_axis_begins_at_zero_where_all_values_can_still_be_told_apart(values: list[float], begins: bool) -> None:
    assert from_zero(values) is begins


def test_an_axis_has_its_marks_where_it_is_told() -> None:
    one = Series(name="one", colour="c0", x=[16, 32, 128], y=[1.0, 2.0, 3.0], texts=["a", "b", "c"])
    picture = Picture(line_chart(one, x=Axis("batch", log=True, ticks=[16, 32, 128])))
    assert picture.labels(0) == ["16", "32", "128"]
    xs = [numbers(node.get("transform"))[0] for node in picture.marks("symbol")]
    assert (xs[1] - xs[0]) / (xs[2] - xs[0]) == pytest.approx(1 / 3, abs=1e-3)


def test_a_spec_has_a_channel_for_each_axis_that_the_reader_may_choose() -> None:
    one = Series(name="one", colour="c0", x=[1, 2], y=[1.0, 2.0], over=[[64, 128], [0.5e-3, 1e-3]])
    chart = line_chart(one, over=[Axis("samples", "count"), Axis("training time", "seconds")], smooth=True)
    chosen = spec(chart)["usermeta"]
    assert [channel["axis"]["title"] for channel in chosen["along"]] == ["samples", "training time, ms"]
    assert {channel["field"] for channel in chosen["along"]} == {"x"}
    assert len(Picture(chart).marks("line")) == 1, "a file has the first axis, and nothing smoothed"


def test_stretches_of_a_timeline_lie_in_their_lanes() -> None:
    lanes = [
        Lane(name="rank 0", spans=[Span(0, 0.0, 1e-3), Span(1, 1e-3, 4e-3)]),
        Lane(name="buckets", spans=[Span(1, 2e-3, 4e-3, "bucket 0")], thin=True),
    ]
    marks = [Mark(x=0.0, text="step 7"), Mark(x=2e-3, text="step 8")]
    picture = Picture(Timeline(**HEAD, x=SECONDS, parts=["data", "exchange"], lanes=lanes, marks=marks))
    spans = [box(path) for path in picture.marks("rect")]
    unit = spans[0][2]
    assert [(left / unit, wide / unit) for left, _, wide, _ in spans] == [
        pytest.approx(pair, abs=1e-2) for pair in ((0, 1), (1, 3), (2, 2))
    ]
    assert [high for _, _, _, high in spans] == pytest.approx([24, 24, 12])
    assert spans[2][1] > spans[0][1] + 24, "below its rank"
    assert {"rank 0", "buckets"} <= set(picture.texts("role-axis-label"))
    assert {"step 7", "step 8"} <= set(picture.texts("mark-text"))


@pytest.mark.parametrize(
    ("axis", "values", "labels", "title"),
    [
        (SECONDS, [0.0, 18e-3], ["0", "5", "10", "15"], "time, ms"),
        (Axis(label="accuracy", unit="percent"), [0.1, 0.93], ["20", "40", "60", "80"], "accuracy, %"),
        (Axis(label="memory", unit="bytes"), [0.0, 3e9], ["0", "0.5", "1", "1.5", "2", "2.5", "3"], "memory, GB"),
        (NUMBER, [0.0, 4e-7], ["0.0000000", "0.0000001", "0.0000002", "0.0000003", "0.0000004"], "loss"),
    ],
)
def test_an_axis_has_round_numbers_in_the_unit_that_its_title_names(
    axis: Axis, values: list[float], labels: list[str], title: str
) -> None:
    picture = Picture(line_chart(Series(name="one", colour="c0", x=[1, 2], y=list(values)), y=axis))
    assert set(labels) <= set(picture.labels(1))
    assert title in picture.texts("role-title")


def test_an_axis_and_its_title_agree_where_a_band_reaches_into_a_larger_unit() -> None:
    one = Series(name="one", colour="c0", x=[1, 2], y=[0.4, 0.9], low=[0.2, 0.5], high=[1.0, 2.0])
    picture = Picture(line_chart(one, y=SECONDS))
    assert "time, s" in picture.texts("role-title")
    assert picture.labels(1) == ["0.5", "1.0", "1.5", "2.0"]


def test_epochs_are_whole() -> None:
    one = Series(name="one", colour="c0", x=[1, 2, 3], y=[1.0, 2.0, 3.0])
    assert Picture(line_chart(one, x=Axis(label="epoch", unit="count"))).labels(0) == ["1", "2", "3"]


def every_kind(name: str) -> list[AnyChart]:
    return [
        line_chart(
            Series(name=name, colour="c0", x=[1, 2], y=[1.0, 2.0], low=[0.5, 1.0], high=[2.0, 3.0]),
            marks=[Mark(x=1, text=name)],
        ),
        Bars(**HEAD, x=SECONDS, parts=["data"], rows=[Bar(name=name, values=[1.0])]),
        Waterfall(**HEAD, x=SECONDS, rows=[Fall(name=name, value=1.0, total=True, text=name)]),
        Scatter(**HEAD, x=SECONDS, y=NUMBER, size=NUMBER, dots=[Dot(name=name, colour="c0", x=1.0, y=1.0)]),
        Points(**HEAD, x=SECONDS, rows=[Point(name=name, colour="c0", value=1.0, text=name)]),
        Timeline(**HEAD, x=SECONDS, parts=["data"], lanes=[Lane(name=name, spans=[Span(0, 0.0, 1.0)])]),
    ]


@pytest.mark.parametrize("kind", range(6), ids=["lines", "bars", "waterfall", "scatter", "points", "timeline"])
def test_a_hostile_name_is_text_and_nothing_else(kind: int) -> None:
    # As long, so that it stands in the same place.
    plain, hostile = Picture(every_kind("p" * len(HOSTILE))[kind]), Picture(every_kind(HOSTILE)[kind])
    assert sorted(each.tag for each in hostile.tree.iter()) == sorted(each.tag for each in plain.tree.iter())
    assert any(text.startswith("</svg><script>") for text in hostile.texts())


def test_a_spec_holds_no_data_and_says_what_it_shows() -> None:
    long = line_chart(Series(name="one", colour="c0", x=list(range(500)), y=[float(x) for x in range(500)]))
    short = line_chart(Series(name="one", colour="c0", x=list(range(31)), y=[float(x) for x in range(31)]))
    assert spec(long) == spec(short)
    assert len(json.dumps(spec(long))) < 8000
    assert spec(long)["description"] == "A title. Words."
    assert with_data(long)["datasets"]["series"][0]["y"][-1] == 499.0
    assert for_page(long)["spec"] == spec(long)
    assert "narrow" not in for_page(long)
    assert "narrow" in for_page(every_kind("plain")[1]), "a phone has the names above the bars"


def test_colours_are_those_of_the_page() -> None:
    light, dark = palette("light"), palette("dark")
    assert light.keys() == dark.keys()
    assert light["page"] == "#ffffff"
    picture = Picture(line_chart(Series(name="one", colour="c3", x=[1, 2], y=[1.0, 2.0])))
    assert picture.marks("line")[0].get("stroke") == light["c3"]


def test_a_png_has_twice_the_dots(tmp_path: Path) -> None:
    from PIL import Image

    chart = every_kind("plain")[0]
    png(chart, tmp_path / "plot.png")
    tree = ElementTree.fromstring(svg(chart))
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.size == (2 * float(tree.get("width") or 0), 2 * float(tree.get("height") or 0))
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10


def test_the_library_is_put_together_once_and_again_where_it_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vl_convert

    made = []
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet: made.append(snippet) or "the library")
    first, second = bundle.bundle(tmp_path / "new"), bundle.bundle(tmp_path / "new")
    assert (first, len(made)) == (second, 1)
    (kept,) = (tmp_path / "new").iterdir()
    assert gzip.decompress(kept.read_bytes()) == b"the library"
    kept.write_bytes(kept.read_bytes()[:10])
    assert (bundle.bundle(tmp_path / "new").script, len(made)) == ("the library", 2)
    kept.write_bytes(b"no archive")
    assert (bundle.bundle(tmp_path / "new").script, len(made)) == ("the library", 3)
    assert bundle.bundle(tmp_path / "new") == first
    (tmp_path / "file").write_text("")
    assert bundle.bundle(tmp_path / "file").script == "the library", "where it cannot be kept"
