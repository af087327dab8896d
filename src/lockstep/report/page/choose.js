// A chart as its reader wants to see it: along another axis, and smoothed. Everything that draws or reads a chart takes the result as any other.

const WINDOWS = [1, 3, 5, 9, 15, 25, 51, 101];

function chosen(chart, state) {
  return alongAxis(smoothed(chart, state.smooth || 1), state.axis);
}

// The same points at other places: those of one of the chart's other axes, by its name.
function alongAxis(chart, name) {
  const number = (chart.over || []).findIndex((axis) => axis.label === name);
  if (number < 0) return chart;
  const channel = chart.spec.usermeta.along[number];
  const marksOf = (data) => data.values.filter((row) => known((row.over || [])[number])).map((row) => ({ ...row, x: row.over[number] }));
  const moved = (layer) => {
    const { x } = layer.encoding || {};
    if (!x || x.field !== "x") return [layer];
    const found = { ...layer, encoding: { ...layer.encoding, x: channel } };
    if (!layer.data) return [found];
    const values = marksOf(layer.data);
    return values.length ? [{ ...found, data: { values } }] : [];
  };
  return {
    ...chart,
    x: chart.over[number],
    series: chart.series.map((one) => ({ ...one, x: one.over[number] })),
    spec: { ...chart.spec, layer: chart.spec.layer.flatMap(moved) },
  };
}

function smoothed(chart, points) {
  if (!chart.smooth || points < 2) return chart;
  return {
    ...chart,
    says: `${chart.says} Smoothed: each line is the mean of ${points} points around it, and the thin line behind it has the points themselves.`,
    series: chart.series.map((one) => ({ ...one, y: means(one.y, points), behind: one.y })),
    spec: { ...chart.spec, layer: [chart.spec.usermeta.behind, ...chart.spec.layer] },
  };
}

// As many points to the left as to the right, so that nothing is moved; near the ends there are fewer of them.
function means(values, points) {
  return values.map((value, at) => {
    if (!known(value)) return value;
    const reach = Math.min((points - 1) / 2, at, values.length - 1 - at);
    const near = values.slice(at - reach, at + reach + 1).filter(known);
    return near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

// What the reader chooses by; a line of few points has nothing to smooth.
function choosersFor(chart, state, changed) {
  const found = [];
  if ((chart.over || []).length) {
    const axes = [chart.x, ...chart.over].map(({ label }) => element("option", { value: label, selected: label === (state.axis || chart.x.label) }, label));
    const select = element("select", { "aria-label": `Axis of ${chart.title}`, onchange: () => {
      state.axis = select.value;
      changed();
    } }, ...axes);
    found.push(element("label", {}, "over", select));
  }
  const most = Math.max(0, ...(chart.series || []).map((one) => one.x.length));
  const windows = WINDOWS.filter((points) => 4 * points <= most);
  if (chart.smooth && windows.length > 1) {
    const said = element("output", {}, state.smooth > 1 ? `${state.smooth} points` : "none");
    const slider = element("input", { type: "range", min: 0, max: windows.length - 1, step: 1, value: Math.max(0, windows.indexOf(state.smooth)), "aria-label": `Smoothing of ${chart.title}`, oninput: () => {
      state.smooth = windows[slider.value];
      said.textContent = state.smooth > 1 ? `${state.smooth} points` : "none";
      slider.setAttribute("aria-valuetext", said.textContent);
      changed();
    } });
    found.push(element("label", {}, "smoothing", slider, said));
  }
  return found;
}
