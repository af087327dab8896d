// What can be read from a chart: its data as rows, its legend, and its stops, which are the places that the pointer and the arrow keys
// go to. A stop has a box in the plot (asked of the view, which knows the scales), a title, and rows of text.

const MARKERS = ["●", "■", "▲", "◆"];

function columnName(axis) {
  const { base } = UNITS[axis.unit || "number"];
  return base ? `${axis.label} (${base})` : axis.label;
}

// A plot's data as rows, the first of them the names of columns; the same as `lockstep report --format csv` writes.
function dataOf(chart) {
  if (chart.kind === "lines") {
    const rows = chart.series.flatMap((one) => one.x.map((x, i) => [one.name, x, one.y[i], (one.low || [])[i], (one.high || [])[i], (one.texts || [])[i]]));
    return [["series", columnName(chart.x), columnName(chart.y), "low", "high", "point"], ...rows];
  }
  if (chart.kind === "bars") {
    return [["bar", ...chart.parts.map((part) => `${part} (${UNITS[chart.x.unit].base})`)], ...chart.rows.map((row) => [row.name, ...row.values])];
  }
  if (chart.kind === "waterfall") {
    return [["part", columnName(chart.x), "total", "text"], ...chart.rows.map((row) => [row.name, row.value, row.total ? 1 : 0, row.text])];
  }
  if (chart.kind === "points") {
    return [["name", columnName(chart.x), "low", "high", "text"], ...chart.rows.map((row) => [row.name, row.value, row.low, row.high, row.text])];
  }
  if (chart.kind === "scatter") {
    const [x, y] = [columnName(chart.x), columnName(chart.y)];
    return [["name", x, `${x} low`, `${x} high`, y, `${y} low`, `${y} high`, columnName(chart.size)], ...chart.dots.map((dot) => [dot.name, dot.x, dot.x_low, dot.x_high, dot.y, dot.y_low, dot.y_high, dot.size])];
  }
  const spans = chart.lanes.flatMap((lane) => lane.spans.map((span) => [lane.name, chart.parts[span[0]], span[1], span[2], span[3]]));
  return [["lane", "part", "begin (s)", "end (s)", "text"], ...spans];
}

function known(value) {
  return value !== null && value !== undefined;
}

function visible(one, state) {
  return !state.off.has(one.name) && !(one.role && state.roles.has(one.role));
}

// Names with their colours, dashes and marks; `off` are those that the reader has switched off.
function legendOf(chart, state) {
  const key = (name, colour, more) => ({ name, colour, off: state.off.has(name), block: true, ...more });
  if (chart.kind === "lines") {
    const marker = (one) => (one.colour === "faint" ? "" : MARKERS[Number(one.colour.slice(1)) % MARKERS.length]);
    return chart.series.filter((one) => !(one.role && state.roles.has(one.role))).map((one) => key(one.name, one.colour, { block: false, dash: one.dash, marker: marker(one) }));
  }
  if (chart.kind === "scatter") return chart.dots.map((dot) => key(dot.name, dot.colour));
  if (chart.kind === "waterfall") {
    const saves = chart.rows.some((row) => !row.total && row.value < 0);
    return [["time of a step", "c0"], ["adds to it", "c1"], ["saves", "c2"]].slice(0, saves ? 3 : 2).map(([name, colour]) => key(name, colour, { fixed: true }));
  }
  if (chart.kind === "points") return []; // each row has its name beside it
  const seen = chart.kind === "bars" ? (i) => chart.rows.some((row) => row.values[i]) : (i) => chart.lanes.some((lane) => lane.spans.some((span) => span[0] === i));
  return chart.parts.filter((_, i) => seen(i)).map((part) => key(part, part));
}

const STOPS = { lines: lineStops, scatter: dotStops, bars: barStops, waterfall: fallStops, points: pointStops, timeline: spanStops };

function lineStops(chart, state) {
  const shown = chart.series.filter((one) => visible(one, state));
  const places = [...new Set(shown.flatMap((one) => one.x))].filter(known).sort((a, b) => a - b);
  return places.map((place) => {
    const found = shown.map((one) => [one, one.x.indexOf(place)]).filter(([one, i]) => i >= 0 && known(one.y[i]));
    const rows = found.map(([one, i]) => ({ colour: one.colour, name: one.texts ? one.texts[i] : one.name, text: between(one.y[i], (one.low || [])[i], (one.high || [])[i], chart.y.unit), order: -one.y[i] }));
    rows.sort((a, b) => a.order - b.order);
    const box = (view) => [view.scale("x")(place), 0, view.scale("x")(place), view.height()];
    return { at: place, box, title: `${chart.x.label} ${written(place, chart.x.unit)}`, rows };
  }).filter((stop) => stop.rows.length);
}

function dotStops(chart, state) {
  const reach = 14;
  return chart.dots.filter((dot) => visible(dot, state)).sort((a, b) => a.x - b.x).map((dot) => ({
    at: dot.name,
    box: (view) => [view.scale("x")(dot.x) - reach, view.scale("y")(dot.y) - reach, view.scale("x")(dot.x) + reach, view.scale("y")(dot.y) + reach],
    title: dot.name,
    rows: [
      { name: chart.x.label, text: between(dot.x, dot.x_low, dot.x_high, chart.x.unit) },
      { name: chart.y.label, text: between(dot.y, dot.y_low, dot.y_high, chart.y.unit) },
      ...(known(dot.size) ? [{ name: chart.size.label, text: written(dot.size, chart.size.unit) }] : []),
    ],
  }));
}

// The box of a row goes to the end of its bar.
function rowBox(name, end) {
  return (view) => {
    const top = view.scale("y")(name);
    return [0, top, view.scale("x")(end), top + view.scale("y").bandwidth()];
  };
}

function barStops(chart, state) {
  return chart.rows.filter((row) => !(row.role && state.roles.has(row.role))).map((row) => {
    const parts = chart.parts.map((part, i) => ({ part, value: row.values[i] })).filter(({ part, value }) => value && !state.off.has(part));
    const total = parts.reduce((sum, { value }) => sum + value, 0);
    const rows = parts.map(({ part, value }) => ({ colour: part, name: part, text: `${written(value, chart.x.unit)}, ${fixed((100 * value) / total, 1)} %` }));
    return { at: row.name, box: rowBox(row.name, total), title: row.name, rows };
  }).filter((stop) => stop.rows.length);
}

function pointStops(chart) {
  return chart.rows.map((row) => ({ at: row.name, box: rowBox(row.name, row.high ?? row.value), title: row.name, rows: [{ colour: row.colour, name: chart.x.label, text: row.text }] }));
}

function fallStops(chart) {
  let reached = 0;
  return chart.rows.map((row) => {
    const begin = row.total ? 0 : reached;
    reached = begin + row.value;
    const colour = row.total ? "c0" : row.value < 0 ? "c2" : "c1";
    const rows = [{ colour, name: row.total ? "time of a step" : "adds", text: written(row.value, chart.x.unit) }, { name: "reached", text: written(reached, chart.x.unit) }];
    return { at: row.name, box: rowBox(row.name, Math.max(begin, reached)), title: row.name, rows };
  });
}

function spanStops(chart, state) {
  const [tops, bottoms] = ["tops", "bottoms"].map((name) => chart.spec.params.find((param) => param.name === name).value);
  let place = -1;
  return chart.lanes.flatMap((lane, i) => lane.spans.map(([part, begin, end, text]) => {
    place += 1;
    const name = chart.parts[part];
    const rows = [{ colour: name, name: "took", text: written(end - begin, chart.x.unit) }, { name: "began at", text: written(begin, chart.x.unit) }];
    const box = (view) => [view.scale("x")(begin), tops[i], view.scale("x")(end), bottoms[i]];
    return { at: place, box, part: name, title: `${lane.name}, ${text || name}`, rows };
  })).filter((stop) => !state.off.has(stop.part));
}
