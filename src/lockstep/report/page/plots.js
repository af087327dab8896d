// Plots with two axes. Every kind of plot is a function (chart, width, state) that returns an svg element and its stops: places that
// the pointer or the arrow keys can go to, each with a box, a title, rows of text and dots to show.

const MARKERS = ["circle", "square", "triangle", "diamond"];

function visible(one, state) {
  return !state.off.has(one.name) && !(one.role && state.roles.has(one.role));
}

function ink(colour) {
  return `var(--${colour})`;
}

function known(values) {
  return values.filter((value) => value !== null && value !== undefined);
}

function extent(values, axis, fromZero) {
  const all = known(values).filter((value) => !axis.log || value > 0);
  if (!all.length) return axis.log ? [1, 10] : [0, 1];
  let low = Math.min(...all);
  let high = Math.max(...all);
  if (axis.log) return low === high ? [low / 2, high * 2] : [low, high];
  if (fromZero) low = Math.min(0, low);
  if (low === high) return axis.unit === "count" ? [low - 1, high + 1] : [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
  return [low, high];
}

function padded([low, high], axis, share) {
  if (axis.log) {
    const factor = (high / low) ** share;
    return [low / factor, high * factor];
  }
  const more = (high - low) * share;
  return [low < 0 ? low - more : Math.max(0, low - more), high + more];
}

function scaled([low, high], from, to, log) {
  if (log) return (value) => from + ((Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
  return (value) => from + ((value - low) / (high - low)) * (to - from);
}

// The empty plot: grid, marks and titles of both axes.
function axes(chart, width, xEnds, yEnds, extraTop = 0, inset = 0) {
  const height = Math.round(Math.min(340, Math.max(230, width * 0.52))) + extraTop;
  const yMarks = axisMarks(chart.y, yEnds[0], yEnds[1], 6);
  const left = Math.ceil(Math.max(...yMarks.texts.map((text) => textWidth(text)), 14)) + 12;
  const box = { left, right: width - 14, top: 26 + extraTop, bottom: height - 42 };
  const xMarks = axisMarks(chart.x, xEnds[0], xEnds[1], Math.max(2, Math.floor((box.right - box.left) / 70)));
  const x = scaled(xEnds, box.left + inset, box.right - inset, chart.x.log);
  const y = scaled(yEnds, box.bottom - inset, box.top + inset, chart.y.log);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "drawing" });
  svg.append(shape("text", { x: 0, y: 13, class: "axis-title" }, yMarks.title));
  yMarks.values.forEach((value, i) => {
    svg.append(
      shape("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value), class: "grid" }),
      shape("text", { x: box.left - 8, y: y(value) + 4, class: "mark end" }, yMarks.texts[i]),
    );
  });
  svg.append(shape("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" }));
  xMarks.values.forEach((value, i) => {
    svg.append(
      shape("line", { x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 4, class: "axis" }),
      shape("text", { x: x(value), y: box.bottom + 18, class: "mark middle" }, xMarks.texts[i]),
    );
  });
  svg.append(shape("text", { x: box.right, y: height - 6, class: "axis-title end" }, xMarks.title));
  return { svg, box, x, y, width, height };
}

function pathOf(points) {
  let path = "";
  let pen = "M";
  for (const [x, y] of points) {
    if (y === null) pen = "M";
    else {
      path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    }
  }
  return path;
}

function marker(kind, x, y, size, colour) {
  const fill = ink(colour);
  if (kind === "circle") return shape("circle", { cx: x, cy: y, r: size, fill, class: "point" });
  if (kind === "square") return shape("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size, fill, class: "point" });
  const far = size * 1.35;
  const corners = kind === "triangle" ? [[x, y - far], [x + far, y + size], [x - far, y + size]] : [[x, y - far], [x + far, y], [x, y + far], [x - far, y]];
  return shape("path", { d: `M${corners.map((corner) => corner.map((v) => v.toFixed(1)).join(" ")).join("L")}Z`, fill, class: "point" });
}

function markerOf(colour) {
  return MARKERS[Number(colour.slice(1)) % MARKERS.length] || "circle";
}

// Whether a line's intervals are drawn as bars at its points instead of a band.
function barred(series) {
  return Boolean(series.low && (series.texts || series.x.length === 1));
}

function drawSeries(plot, series, y, aside) {
  const { svg, x } = plot;
  const stroke = ink(series.colour);
  // Intervals of one place stand beside each other, not upon each other.
  const moved = (i) => (barred(series) && series.low[i] !== null ? aside : 0);
  const points = series.x.map((value, i) => [x(value) + moved(i), series.y[i] === null ? null : y(series.y[i])]);
  if (series.low && !barred(series)) {
    const both = series.x.map((value, i) => [x(value), series.low[i], series.high[i]]).filter((p) => p[1] !== null && p[2] !== null);
    const upper = both.map((p) => `${p[0].toFixed(1)} ${y(p[2]).toFixed(1)}`);
    const lower = both.map((p) => `${p[0].toFixed(1)} ${y(p[1]).toFixed(1)}`).reverse();
    if (both.length > 1) svg.append(shape("path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: stroke, class: "band" }));
  }
  svg.append(shape("path", { d: pathOf(points), stroke, class: series.dash ? "line dashed" : "line" }));
  const clear = points.length <= 30 && series.colour !== "faint" && series.role !== "ranks";
  points.forEach(([px, py], i) => {
    if (py === null) return;
    if (barred(series) && series.low[i] !== null) {
      const [top, bottom] = [y(series.high[i]), y(series.low[i])];
      svg.append(shape("path", { d: `M${px} ${top}V${bottom}M${px - 5} ${top}h10M${px - 5} ${bottom}h10`, stroke, class: "whisker" }));
    }
    if (clear || points.length === 1) svg.append(marker(markerOf(series.colour), px, py, 3.2, series.colour));
  });
}

function drawMarks(plot, marks) {
  marks.forEach((mark, i) => {
    const at = plot.x(mark.x);
    const text = cut(mark.text, plot.width * 0.9);
    const wide = textWidth(text) * 1.08; // it is bold
    const height = plot.box.top - 5 - 15 * (marks.length - 1 - i);
    plot.svg.append(
      shape("line", { x1: at, x2: at, y1: height + 4, y2: plot.box.bottom, stroke: ink(mark.colour || "ink"), class: "flag" }),
      shape("text", { x: Math.max(0, Math.min(at - wide / 2, plot.width - wide)), y: height, fill: ink(mark.colour || "ink"), class: "note" }, text),
    );
  });
}

function lines(chart, width, state) {
  const shown = chart.series.filter((one) => visible(one, state));
  const marks = chart.marks || [];
  const ends = extent(shown.flatMap((one) => one.x), chart.x);
  const values = shown.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]);
  const yEnds = padded(extent(values, chart.y, chart.y.unit === "times"), chart.y, 0.05);
  const around = shown.some((one) => one.texts) ? 0.08 : 0.02;
  const plot = axes(chart, width, padded(ends, chart.x, around), yEnds, marks.length ? 15 * marks.length + 4 : 0);
  drawMarks(plot, marks.filter((mark) => mark.x >= ends[0] && mark.x <= ends[1]));
  const beside = shown.filter(barred);
  for (const one of shown) drawSeries(plot, one, plot.y, (beside.indexOf(one) - (beside.length - 1) / 2) * 8);
  const places = [...new Set(shown.flatMap((one) => one.x))].sort((a, b) => a - b);
  const stops = places.map((place) => lineStop(chart, plot, shown, place)).filter((stop) => stop.rows.length);
  return { svg: plot.svg, stops, legend: legendOf(chart.series, state) };
}

function lineStop(chart, plot, shown, place) {
  const rows = [];
  const dots = [];
  for (const one of shown) {
    const i = one.x.indexOf(place);
    if (i < 0 || one.y[i] === null) continue;
    const text = between(one.y[i], (one.low || [])[i], (one.high || [])[i], chart.y.unit);
    rows.push({ colour: one.colour, name: one.texts ? one.texts[i] : one.name, text, order: -one.y[i] });
    dots.push([plot.x(place), plot.y(one.y[i]), one.colour]);
  }
  rows.sort((a, b) => a.order - b.order);
  const at = plot.x(place);
  return { box: [at, plot.box.top, at, plot.box.bottom], title: `${chart.x.label} ${written(place, chart.x.unit)}`, rows, dots, line: [at, plot.box.top, plot.box.bottom] };
}

function legendOf(series, state) {
  return series
    .filter((one) => !(one.role && state.roles.has(one.role)))
    .map((one) => ({ name: one.name, colour: one.colour, dash: one.dash, marker: one.colour === "faint" ? null : markerOf(one.colour), off: state.off.has(one.name) }));
}

function scatter(chart, width, state) {
  const shown = chart.dots.filter((dot) => visible(dot, state));
  const xs = shown.flatMap((dot) => [dot.x, dot.x_low, dot.x_high]);
  const ys = shown.flatMap((dot) => [dot.y, dot.y_low, dot.y_high]);
  // Room for the circles beyond the outermost values.
  const plot = axes(chart, width, padded(extent(xs, chart.x), chart.x, 0.04), padded(extent(ys, chart.y), chart.y, 0.04), 0, 22);
  const largest = Math.max(...known(chart.dots.map((dot) => dot.size)), 0);
  const stops = [];
  const taken = [];
  const radius = (dot) => (largest && dot.size ? Math.max(5, 20 * Math.sqrt(dot.size / largest)) : 7);
  for (const dot of [...shown].sort((a, b) => radius(b) - radius(a))) {
    const [x, y, r] = [plot.x(dot.x), plot.y(dot.y), radius(dot)];
    const cross = [];
    if (known([dot.x_low]).length) cross.push(`M${plot.x(dot.x_low)} ${y}H${plot.x(dot.x_high)}`);
    if (known([dot.y_low]).length) cross.push(`M${x} ${plot.y(dot.y_low)}V${plot.y(dot.y_high)}`);
    if (cross.length) plot.svg.append(shape("path", { d: cross.join(""), stroke: ink(dot.colour), class: "whisker" }));
    plot.svg.append(shape("circle", { cx: x, cy: y, r, fill: ink(dot.colour), stroke: ink(dot.colour), class: "bubble" }));
    taken.push([x - r, y - r, x + r, y + r]);
    if (known([dot.x_low]).length) taken.push([plot.x(dot.x_low), y - 1, plot.x(dot.x_high), y + 1]);
    if (known([dot.y_low]).length) taken.push([x - 1, plot.y(dot.y_high), x + 1, plot.y(dot.y_low)]);
    const rows = [
      { name: chart.x.label, text: between(dot.x, dot.x_low, dot.x_high, chart.x.unit) },
      { name: chart.y.label, text: between(dot.y, dot.y_low, dot.y_high, chart.y.unit) },
      ...(known([dot.size]).length ? [{ name: chart.size.label, text: written(dot.size, chart.size.unit) }] : []),
    ];
    stops.push({ box: [x - r, y - r, x + r, y + r], title: dot.name, rows, dots: [], colour: dot.colour });
  }
  if (shown.length <= 12) for (const stop of stops) nameBubble(plot, stop, taken);
  stops.sort((a, b) => a.box[0] - b.box[0]);
  return { svg: plot.svg, stops, legend: chart.dots.map((dot) => ({ name: dot.name, colour: dot.colour, block: true, off: state.off.has(dot.name) })) };
}

// A bubble's name beside it, where no other bubble or name is.
function nameBubble(plot, stop, taken) {
  const [x0, y0, x1, y1] = stop.box;
  const text = cut(stop.title, 170, 11);
  const [wide, high, middle] = [textWidth(text, 11), 13, (y0 + y1) / 2];
  const places = [
    [x1 + 4, middle + 4],
    [x0 - 4 - wide, middle + 4],
    [(x0 + x1) / 2 + 4, y0 - 5],
    [(x0 + x1) / 2 - 4 - wide, y0 - 5],
    [(x0 + x1) / 2 + 4, y1 + 13],
    [(x0 + x1) / 2 - 4 - wide, y1 + 13],
  ];
  for (const [x, y] of places) {
    const box = [x, y - high + 3, x + wide, y + 3];
    const free = box[0] > plot.box.left && box[2] < plot.box.right + 10 && box[1] > 14 && box[3] < plot.box.bottom;
    if (free && !taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1])) {
      taken.push(box);
      plot.svg.append(shape("text", { x, y, class: "note small halo" }, text));
      return;
    }
  }
}
