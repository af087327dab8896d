// A plot with all that belongs to it: legend, switches, what is under the pointer, its data, and files of it.

const UNITS = { seconds: "s", bytes: "B", binary: "B", percent: "share of 1", rate: "images/s", bandwidth: "GB/s", times: "x" };

function columnName(axis) {
  return UNITS[axis.unit] ? `${axis.label} (${UNITS[axis.unit]})` : axis.label;
}

// A plot's data as rows, the first of them the names of columns; the same as `lockstep report --format csv` writes.
function dataOf(chart) {
  if (chart.kind === "lines") {
    const rows = chart.series.flatMap((one) => one.x.map((x, i) => [one.name, x, one.y[i], (one.low || [])[i], (one.high || [])[i], (one.texts || [])[i]]));
    return [["series", columnName(chart.x), columnName(chart.y), "low", "high", "point"], ...rows];
  }
  if (chart.kind === "bars") {
    return [["bar", ...chart.parts.map((part) => `${part} (${UNITS[chart.x.unit]})`)], ...chart.rows.map((row) => [row.name, ...row.values])];
  }
  if (chart.kind === "waterfall") {
    return [["part", columnName(chart.x), "total", "text"], ...chart.rows.map((row) => [row.name, row.value, row.total ? 1 : 0, row.text])];
  }
  if (chart.kind === "scatter") {
    const [x, y] = [columnName(chart.x), columnName(chart.y)];
    return [["name", x, `${x} low`, `${x} high`, y, `${y} low`, `${y} high`, columnName(chart.size)], ...chart.dots.map((dot) => [dot.name, dot.x, dot.x_low, dot.x_high, dot.y, dot.y_low, dot.y_high, dot.size])];
  }
  const spans = chart.lanes.flatMap((lane) => lane.spans.map((span) => [lane.name, chart.parts[span[0]], span[1], span[2], span[3]]));
  return [["lane", "part", "begin (s)", "end (s)", "text"], ...spans];
}

function csvOf(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function swatch(item) {
  const svg = shape("svg", { width: 22, height: 12, "aria-hidden": "true", class: "swatch" });
  svg.append(...swatchShapes(item, 0, 6));
  return svg;
}

function swatchShapes(item, x, y) {
  if (item.block) return [shape("rect", { x: x + 5, y: y - 5, width: 11, height: 11, rx: 2, fill: ink(item.colour) })];
  const line = shape("line", { x1: x, x2: x + 21, y1: y, y2: y, stroke: ink(item.colour), class: item.dash ? "line dashed" : "line" });
  return item.marker ? [line, marker(item.marker, x + 10.5, y, 3.2, item.colour)] : [line];
}

function figureFor(chart) {
  const lists = { lines: chart.series, scatter: chart.dots };
  const state = {
    off: new Set((lists[chart.kind] || []).filter((one) => one.shown === false).map((one) => one.name)),
    roles: new Set(chart.hidden || []),
  };
  const plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "plot", "aria-label": `${chart.title}. ${chart.says} Arrow keys read its values.` });
  const legend = element("div", { class: "legend", role: "group", "aria-label": `What ${chart.title} shows` });
  const status = element("div", { class: "unseen", role: "status" });
  const table = element("div", { class: "data", hidden: true });
  const figure = element("figure", { id: chart.id, class: `plot-${chart.kind}` });
  let width = 0;
  const redraw = () => {
    if (width < 50) return;
    const drawn = KINDS[chart.kind](chart, width, state);
    drawn.svg.setAttribute("aria-hidden", "true");
    plot.replaceChildren(drawn.svg);
    follow(plot, drawn, status);
    fillLegend(legend, drawn.legend, state, redraw);
  };
  const head = element("div", { class: "figure-head" }, element("h4", {}, chart.title), toolsFor(chart, state, table));
  put(figure, {}, [head, element("p", { class: "says" }, chart.says), switchesFor(chart, state, redraw), legend, plot, status, table]);
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now !== width) {
      width = now;
      redraw();
    }
  }).observe(plot);
  return figure;
}

function fillLegend(legend, items, state, redraw) {
  // Pressing a button draws the legend anew: the same button keeps the focus.
  const focused = [...legend.children].indexOf(document.activeElement);
  legend.replaceChildren(
    ...items.map((item) => {
      if (item.fixed) return element("span", { class: "key" }, swatch(item), element("span", {}, item.name));
      const press = () => {
        if (!state.off.delete(item.name)) state.off.add(item.name);
        redraw();
      };
      return element("button", { type: "button", class: "key", "aria-pressed": String(!item.off), title: item.name, onclick: press }, swatch(item), element("span", {}, item.name));
    }),
  );
  if (focused >= 0 && legend.children[focused]) legend.children[focused].focus();
}

function switchesFor(chart, state, redraw) {
  const all = (chart.series || chart.rows || []).map((one) => one.role).filter(Boolean);
  // A single line has its switch in the legend.
  const roles = [...new Set(all)].filter((role) => (chart.hidden || []).includes(role) || all.filter((other) => other === role).length > 1);
  if (!roles.some((role) => (chart.hidden || []).includes(role))) return null;
  const boxes = roles.map((role) => {
    const box = element("input", { type: "checkbox", onchange: () => {
      if (box.checked) state.roles.delete(role);
      else state.roles.add(role);
      redraw();
    } });
    box.checked = !state.roles.has(role);
    return element("label", {}, box, role);
  });
  return element("div", { class: "switches" }, ...boxes);
}

// What is under the pointer, or where the arrow keys have gone.
function follow(plot, drawn, status) {
  const tip = element("div", { class: "tip", hidden: true });
  const over = shape("g", {});
  drawn.svg.append(over);
  plot.append(tip);
  let at = -1;
  const show = (place, spoken) => {
    at = place;
    const stop = drawn.stops[place];
    if (!stop) return;
    over.replaceChildren(
      ...(stop.line ? [shape("line", { x1: stop.line[0], x2: stop.line[0], y1: stop.line[1], y2: stop.line[2], class: "cursor" })] : [shape("rect", { x: stop.box[0], y: stop.box[1], width: Math.max(1, stop.box[2] - stop.box[0]), height: stop.box[3] - stop.box[1], class: stop.at === undefined ? "focus-box" : "row-box" })]),
      ...stop.dots.map(([x, y, colour]) => shape("circle", { cx: x, cy: y, r: 4.5, fill: ink(colour), class: "dot" })),
    );
    const rows = stop.rows.slice(0, 14);
    tip.replaceChildren(
      element("strong", {}, stop.title),
      ...rows.map((row) => element("div", { class: "tip-row" }, row.colour ? swatch({ colour: row.colour, block: true }) : null, element("span", {}, row.name), element("b", {}, row.text))),
      ...(stop.rows.length > rows.length ? [element("div", {}, `and ${stop.rows.length - rows.length} more`)] : []),
    );
    tip.hidden = false;
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    // Beside what it is about: a bar ends before its box does.
    const end = (stop.at ?? stop.box[2]) + 12;
    const right = end + wide <= plot.clientWidth;
    const x = right ? end : Math.max(0, stop.box[0] - 12 - wide);
    const beside = right || stop.box[0] - 12 - wide >= 0;
    const y = beside ? Math.max(0, Math.min(stop.box[1] + 6, plot.clientHeight - high)) : stop.box[3] + 6;
    tip.style.left = `${Math.min(x, Math.max(0, plot.clientWidth - wide))}px`;
    tip.style.top = `${y}px`;
    if (spoken) status.textContent = `${stop.title}: ${stop.rows.map((row) => `${row.name} ${row.text}`).join(", ")}`;
  };
  const hide = () => {
    tip.hidden = true;
    over.replaceChildren();
    at = -1;
  };
  plot.onpointermove = (event) => {
    const frame = drawn.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const far = ([x0, y0, x1, y1]) => Math.hypot(Math.max(x0 - x, 0, x - x1), Math.max(y0 - y, 0, y - y1));
    let best = -1;
    drawn.stops.forEach((stop, place) => {
      if (best < 0 || far(stop.box) < far(drawn.stops[best].box)) best = place;
    });
    if (best !== at) show(best, false);
  };
  plot.onpointerleave = hide;
  plot.onblur = hide;
  plot.onkeydown = (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") hide();
    else if (event.key in steps && drawn.stops.length) {
      event.preventDefault();
      show(Math.max(0, Math.min(drawn.stops.length - 1, at + steps[event.key])), true);
    }
  };
}

function toolsFor(chart, state, table) {
  const button = (name, title, action) => element("button", { type: "button", class: "tool", title, "aria-label": `${title}: ${chart.title}`, onclick: action }, name);
  const show = element("button", { type: "button", class: "tool", title: "Show the data as a table", "aria-expanded": "false", "aria-label": `Data of ${chart.title}`, onclick: () => {
    table.hidden = !table.hidden;
    show.setAttribute("aria-expanded", String(!table.hidden));
    if (!table.hidden && !table.firstChild) table.append(plainTable(dataOf(chart)));
  } }, "Data");
  return element("div", { class: "tools" }, show,
    button("CSV", "Save the data as CSV", () => save(`${chart.id}.csv`, new Blob([csvOf(dataOf(chart))], { type: "text/csv" }))),
    button("SVG", "Save the plot as SVG", () => save(`${chart.id}.svg`, new Blob([paper(chart, state)], { type: "image/svg+xml" }))),
    button("PNG", "Save the plot as PNG", () => savePng(chart, state)),
  );
}

function plainTable(rows) {
  const most = 400;
  const body = rows.slice(1, most + 1).map((row) => element("tr", {}, ...row.map((value) => element("td", {}, value === null || value === undefined ? "" : value))));
  const left = rows.length - 1 - body.length;
  return element("div", {}, element("table", {}, element("thead", {}, element("tr", {}, ...rows[0].map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...body)), left > 0 ? element("p", {}, `${left} more rows are in the CSV file.`) : null);
}

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "text-anchor", "paint-order"];

// The plot as a file for paper: light, with its title and legend, and with all colours written out.
function paper(chart, state) {
  const width = 760;
  const drawn = KINDS[chart.kind](chart, width - 40, state);
  const outer = shape("svg", { xmlns: "http://www.w3.org/2000/svg", width });
  outer.append(shape("text", { x: 20, y: 30, class: "paper-title" }, chart.title));
  let [x, y] = [20, 54];
  for (const item of drawn.legend.filter((one) => !one.off)) {
    const wide = 28 + textWidth(item.name) + 16;
    if (x + wide > width - 20 && x > 20) [x, y] = [20, y + 20];
    outer.append(...swatchShapes(item, x, y - 4), shape("text", { x: x + 27, y, class: "mark" }, item.name));
    x += wide;
  }
  const inner = shape("g", { transform: `translate(20 ${y + 14})` }, ...drawn.svg.childNodes);
  const height = y + 14 + Number(drawn.svg.getAttribute("height")) + 12;
  outer.prepend(shape("rect", { width, height, fill: "#ffffff" }));
  outer.append(inner);
  outer.setAttribute("height", height);
  outer.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const holder = element("div", { class: "paper" }, outer);
  document.body.append(holder);
  for (const node of outer.querySelectorAll("*")) {
    const seen = getComputedStyle(node);
    for (const name of STYLES) node.setAttribute(name, seen.getPropertyValue(name));
  }
  for (const node of outer.querySelectorAll("*")) {
    node.removeAttribute("class");
    node.removeAttribute("style");
  }
  holder.remove();
  return new XMLSerializer().serializeToString(outer);
}

function savePng(chart, state) {
  const text = paper(chart, state);
  const picture = new Image();
  picture.onload = () => {
    const canvas = element("canvas", { width: picture.width * 2, height: picture.height * 2 });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(`${chart.id}.png`, blob), "image/png");
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}
