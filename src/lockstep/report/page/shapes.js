// Plots of bars: stacked, falling, and along a time axis.

function rowBox(names, width) {
  // On a narrow page names stand above their bars.
  const above = width < 560;
  const widest = Math.max(...names.map((name) => textWidth(name)), 20);
  return { above, left: above ? 0 : Math.min(widest + 14, width * 0.34) };
}

function timeAxis(svg, axis, high, from, to, bottom, top) {
  const marks = axisMarks(axis, 0, high, Math.max(2, Math.floor((to - from) / 90)));
  const x = scaled([0, high], from, to);
  marks.values.forEach((value, i) => {
    svg.append(
      shape("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid" }),
      shape("text", { x: x(value), y: bottom + 16, class: `mark ${i === 0 && from < 12 ? "" : "middle"}` }, marks.texts[i]),
    );
  });
  svg.append(shape("text", { x: to, y: bottom + 34, class: "axis-title end" }, marks.title));
  return x;
}

function rowName(svg, layout, name, y, high) {
  const text = cut(name, layout.above ? layout.width - 4 : layout.left - 14);
  svg.append(
    layout.above
      ? shape("text", { x: 0, y: y - 5, class: "mark strong" }, text)
      : shape("text", { x: layout.left - 8, y: y + high / 2 + 4, class: "mark strong end" }, text),
  );
}

function bars(chart, width, state) {
  const rows = chart.rows.filter((row) => !(row.role && state.roles.has(row.role)));
  const on = chart.parts.map((part) => !state.off.has(part));
  const total = (row) => row.values.reduce((sum, value, i) => sum + (on[i] ? value : 0), 0);
  const layout = { ...rowBox(rows.map((row) => row.name), width), width };
  const [thick, step] = layout.above ? [18, 46] : [20, 32];
  const top = layout.above ? 26 : 10;
  const bottom = top + rows.length * step - (step - thick) + 8;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${bottom + 42}`, width, height: bottom + 42, class: "drawing" });
  const most = Math.max(...rows.map(total), 1e-12);
  const room = textWidth(written(most, chart.x.unit)) + 14;
  const x = timeAxis(svg, chart.x, most, layout.left, width - room, bottom, top - 4);
  const stops = [];
  rows.forEach((row, place) => {
    const y = top + place * step;
    rowName(svg, layout, row.name, y, thick);
    let at = 0;
    chart.parts.forEach((part, i) => {
      const value = row.values[i];
      if (!on[i] || !value) return;
      const [from, to] = [x(at), x(at + value)];
      svg.append(shape("rect", { x: from, y, width: Math.max(0, to - from - (to - from > 3 ? 1 : 0)), height: thick, fill: ink(part) }));
      const share = `${fixed((100 * value) / total(row), 0)} %`;
      if (to - from > textWidth(share, 11) + 8) svg.append(shape("text", { x: (from + to) / 2, y: y + thick / 2 + 4, fill: ink(`on-${part}`), class: "share middle" }, share));
      at += value;
    });
    svg.append(shape("text", { x: x(at) + 6, y: y + thick / 2 + 4, class: "mark" }, written(at, chart.x.unit)));
    const parts = chart.parts.map((part, i) => ({ colour: part, name: part, text: `${written(row.values[i], chart.x.unit)}, ${fixed((100 * row.values[i]) / (total(row) || 1), 1)} %`, value: row.values[i], on: on[i] }));
    const box = [0, y - (layout.above ? 20 : 4), width, y + thick + 4];
    stops.push({ box, at: x(at) + room, title: row.name, rows: parts.filter((part) => part.on && part.value), dots: [] });
  });
  return { svg, stops, legend: chart.parts.filter((_, i) => chart.rows.some((row) => row.values[i])).map((part) => ({ name: part, colour: part, block: true, off: state.off.has(part) })) };
}

function waterfall(chart, width) {
  const layout = { ...rowBox(chart.rows.map((row) => row.name), width), width };
  const [thick, step] = layout.above ? [16, 42] : [18, 28];
  const top = layout.above ? 26 : 10;
  const bottom = top + chart.rows.length * step - (step - thick) + 8;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${bottom + 42}`, width, height: bottom + 42, class: "drawing" });
  const room = Math.max(...chart.rows.map((row) => textWidth(row.text || ""))) + 14;
  let reached = 0;
  const ends = chart.rows.map((row) => {
    const begin = row.total ? 0 : reached;
    reached = row.total ? row.value : reached + row.value;
    return [begin, reached];
  });
  const x = timeAxis(svg, chart.x, Math.max(...ends.flat()), layout.left, width - room, bottom, top - 4);
  const stops = [];
  chart.rows.forEach((row, place) => {
    const y = top + place * step;
    const [begin, end] = ends[place];
    const colour = row.total ? "c0" : row.value < 0 ? "c2" : "c1";
    rowName(svg, layout, row.name, y, thick);
    const [from, to] = [x(Math.min(begin, end)), x(Math.max(begin, end))];
    svg.append(shape("rect", { x: from, y, width: Math.max(1.5, to - from), height: thick, fill: ink(colour) }));
    if (place + 1 < chart.rows.length) svg.append(shape("line", { x1: x(end), x2: x(end), y1: y, y2: y + step, class: "join" }));
    svg.append(shape("text", { x: to + 6, y: y + thick / 2 + 4, class: "mark" }, row.text || written(row.value, chart.x.unit)));
    stops.push({ box: [0, y - 4, width, y + thick + 4], at: to + room, title: row.name, rows: [{ colour, name: row.total ? "time of a step" : "adds", text: written(row.value, chart.x.unit) }, { name: "reached", text: written(end, chart.x.unit) }], dots: [] });
  });
  const kinds = [["time of a step", "c0"], ["adds to it", "c1"], ...(chart.rows.some((row) => !row.total && row.value < 0) ? [["saves", "c2"]] : [])];
  return { svg, stops, legend: kinds.map(([name, colour]) => ({ name, colour, block: true, fixed: true })) };
}

function timeline(chart, width, state) {
  const layout = { above: false, left: Math.max(...chart.lanes.map((lane) => textWidth(lane.name)), 20) + 14, width };
  const marks = chart.marks || [];
  const top = 24;
  const heights = chart.lanes.map((lane) => (lane.thin ? 12 : 24));
  const tops = heights.map((_, i) => top + heights.slice(0, i).reduce((sum, high, k) => sum + high + (chart.lanes[k + 1].thin ? 3 : 12), 0));
  const bottom = tops[tops.length - 1] + heights[heights.length - 1] + 10;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${bottom + 42}`, width, height: bottom + 42, class: "drawing" });
  const last = Math.max(...chart.lanes.flatMap((lane) => lane.spans.map((span) => span[2])));
  const x = timeAxis(svg, chart.x, last, layout.left, width - 16, bottom, top - 6);
  let free = -1;
  for (const mark of marks) {
    const at = x(mark.x);
    svg.append(shape("line", { x1: at, x2: at, y1: top - 8, y2: bottom, class: "flag faint" }));
    if (at >= free) {
      svg.append(shape("text", { x: at + 3, y: top - 11, class: "note small" }, mark.text));
      free = at + textWidth(mark.text, 11) + 8;
    }
  }
  const stops = [];
  chart.lanes.forEach((lane, i) => {
    rowName(svg, layout, lane.name, tops[i], heights[i]);
    for (const [part, begin, end, text] of lane.spans) {
      const name = chart.parts[part];
      if (state.off.has(name)) continue;
      const [from, to] = [x(begin), x(end)];
      svg.append(shape("rect", { x: from, y: tops[i], width: Math.max(0.6, to - from), height: heights[i], fill: ink(name) }));
      stops.push({ box: [from, tops[i], to, tops[i] + heights[i]], title: `${lane.name}, ${text || name}`, rows: [{ colour: name, name: "took", text: written(end - begin, chart.x.unit) }, { name: "began at", text: written(begin, chart.x.unit) }], dots: [] });
    }
  });
  const used = new Set(chart.lanes.flatMap((lane) => lane.spans.map((span) => span[0])));
  return { svg, stops, legend: chart.parts.filter((_, i) => used.has(i)).map((part) => ({ name: part, colour: part, block: true, off: state.off.has(part) })) };
}

const KINDS = { lines, scatter, bars, waterfall, timeline };
