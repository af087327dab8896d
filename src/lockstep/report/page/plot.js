// A chart drawn by Vega-Lite. Its spec comes with it and holds no data; what changes while it is looked at are the spec's parameters.

const [LEAST, NARROW] = [50, 560];
const OPTIONS = { mode: "vega-lite", actions: false, ast: true, renderer: "svg", tooltip: false, defaultStyle: false };

// The library is in the page, packed, and allowed by its hash; a page that has a server says where it is to be had.
let loading = null;
function library() {
  const held = document.getElementById("library");
  loading ||= held.dataset.src ? load(held.dataset.src) : unpack(held.textContent);
  return loading;
}

function load(src) {
  return new Promise((done, failed) => {
    const script = element("script", { src, onload: () => done(window.vegaEmbed), onerror: () => failed(new Error("the plotting library cannot be loaded")) });
    document.head.append(script);
  });
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", {}, await new Response(stream).text()));
  return window.vegaEmbed;
}

function nowPalette(spec) {
  const style = getComputedStyle(document.documentElement);
  const names = Object.keys(spec.params.find((param) => param.name === "palette").value);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function withParams(spec, values) {
  return spec.params.map((param) => (param.name in values ? { ...param, value: values[param.name] } : param));
}

function switched(chart, state) {
  return { off: [...state.off], gone: [...state.roles], named: legendOf(chart, state).filter((item) => !item.off).map((item) => item.name) };
}

function withData(chart, spec) {
  // Vega writes into what it is given.
  return { ...spec, datasets: { [spec.data.name]: structuredClone(chart[spec.data.name]) } };
}

function withoutLegends(encoding) {
  return Object.fromEntries(Object.entries(encoding).map(([name, channel]) => [name, "legend" in channel ? { ...channel, legend: null } : channel]));
}

// By its width, or by how many rows are shown; a timeline has a height of its own.
function heightOf(chart, spec, state, width) {
  if (["lines", "scatter"].includes(chart.kind)) return Math.round(Math.min(290, Math.max(180, width * 0.42)));
  return chart.rows ? spec.usermeta.step * chart.rows.filter((row) => !state.roles.has(row.role)).length : spec.height;
}

function specFor(chart, width) {
  return width < NARROW && chart.narrow ? chart.narrow : chart.spec;
}

// On the page: as wide as its place, in the page's colours; the title and the legend are the page's own.
function onScreen(chart, state, width) {
  const spec = specFor(chart, width);
  const { subtitle, subtitleFontSize, subtitleFontWeight, subtitleColor, anchor, frame, offset } = spec.title;
  return {
    ...withData(chart, spec),
    title: subtitle ? { text: subtitle, fontSize: subtitleFontSize, fontWeight: subtitleFontWeight, color: subtitleColor, anchor, frame, offset } : undefined,
    width,
    height: heightOf(chart, spec, state, width),
    padding: { left: 0, right: 14, top: subtitle ? 2 : offset, bottom: 4 },
    params: withParams(spec, { ...switched(chart, state), palette: nowPalette(spec) }),
    layer: spec.layer.map((layer) => ({ ...layer, encoding: withoutLegends(layer.encoding || {}) })),
  };
}

// Marks that Vega has and Vega-Lite does not.
function patch(spec) {
  return { ...spec, marks: [...spec.marks, ...((spec.usermeta || {}).marks || [])] };
}

// As a file: light, with title and legend.
async function onPaper(chart, state) {
  const spec = { ...withData(chart, chart.spec), params: withParams(chart.spec, switched(chart, state)) };
  const embed = await library();
  return embed(element("div", {}), spec, OPTIONS);
}

// Plots near the window are drawn at once, the others one by one when there is nothing else to do: a page may be printed at any time.
const waiting = [];
const idle = (work) => (window.requestIdleCallback ? requestIdleCallback(work, { timeout: 2000 }) : setTimeout(work, 100));
let busy = false;
async function drawNext() {
  const next = waiting.shift();
  busy = Boolean(next);
  if (!next) return;
  await next();
  idle(drawNext);
}

function drawInTime(show) {
  waiting.push(show);
  if (!busy) idle(drawNext);
  busy = true;
}

// Keeps a plot in its place as it should be. `changed` is called whenever it has been drawn.
function plotter(node, given, state, changed) {
  let [chart, view, result, width, seen, turn] = [given, null, null, 0, false, 0];
  const draw = async () => {
    if (!seen || width < LEAST) return;
    turn += 1;
    const [mine, theme] = [turn, document.documentElement.dataset.theme];
    try {
      const embed = await library();
      if (mine !== turn) return;
      const drawn = await embed(node, onScreen(chart, state, width), { ...OPTIONS, patch });
      if (mine !== turn) {
        drawn.finalize();
        return;
      }
      if (result) result.finalize();
      [result, view] = [drawn, drawn.view];
      node.dataset.drawn = "yes";
      if (theme === document.documentElement.dataset.theme) changed(view);
      else change({ palette: nowPalette(chart.spec) });
    } catch (error) {
      node.replaceChildren(element("p", { class: "says" }, `This plot cannot be drawn here (${error.message}). Data shows its numbers.`));
    }
  };
  const fit = () => {
    view.width(width).height(heightOf(chart, specFor(chart, width), state, width)).run();
    changed(view);
  };
  const change = (values) => {
    if (!view) return;
    for (const [name, value] of Object.entries(values)) view.signal(name, value);
    fit();
  };
  const resize = (now) => {
    const again = !view || specFor(chart, now) !== specFor(chart, width);
    width = now;
    if (again) draw();
    else fit();
  };
  const size = new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now !== width && now >= LEAST) resize(now);
  });
  size.observe(node);
  const show = async () => {
    if (seen) return;
    seen = true;
    await draw();
  };
  const sight = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) show();
  }, { rootMargin: "600px" });
  sight.observe(node);
  const ended = new AbortController();
  addEventListener("beforeprint", show, { signal: ended.signal });
  document.addEventListener("theme", () => change({ palette: nowPalette(chart.spec) }), { signal: ended.signal });
  drawInTime(show);
  return {
    at: (place) => view && view.signal("at", place).run(),
    close: () => {
      for (const one of [size, sight]) one.disconnect();
      ended.abort();
      if (result) result.finalize();
    },
    switch: () => change(switched(chart, state)),
    update: (next) => {
      // What a reader may choose (usermeta) is in the spec when they have chosen it.
      const drawnBy = (one) => JSON.stringify([one.spec, one.narrow], (key, value) => (key === "usermeta" ? undefined : value));
      const same = drawnBy(chart) === drawnBy(next);
      chart = next;
      if (!same) draw();
      else if (view) {
        const name = chart.spec.data.name;
        view.data(name, structuredClone(chart[name]));
        fit();
      }
    },
  };
}
