// A plot with all that belongs to it: legend, switches, what is under the pointer, its data, and files of it.

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
  const kind = item.block ? "block" : item.dash ? "line dashed" : "line";
  const node = element("span", { class: `swatch ${kind}`, "aria-hidden": "true" }, item.marker || "");
  node.style.color = `var(--${item.colour})`;
  return node;
}

// The figure of a chart. `figure.update(chart)` shows other data in its place; `figure.close()` lets go of what it holds.
function figureFor(given) {
  let [whole, chart] = [given, given]; // as it came, and as its reader wants to see it
  const lists = { lines: chart.series, scatter: chart.dots };
  const state = {
    off: new Set((lists[chart.kind] || []).filter((one) => one.shown === false).map((one) => one.name)),
    roles: new Set(chart.hidden || []),
    axis: "",
    smooth: 1,
  };
  const drawing = element("div", { class: "drawing" });
  const plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "plot", "aria-label": `${chart.title}: arrow keys read its values` }, drawing);
  const legend = element("div", { class: "legend", role: "group", "aria-label": `What ${chart.title} shows` });
  const status = element("div", { class: "unseen", role: "status" });
  const table = element("div", { class: "data", hidden: true });
  const says = element("p", { class: "says" }, chart.says);
  const figure = element("figure", { id: chart.id, class: `plot-${chart.kind}` });
  const reader = follow(plot, status, (place) => drawn.at(place));
  const drawn = plotter(drawing, chart, state, (view) => reader.go(view, STOPS[chart.kind](chart, state)));
  const redraw = () => {
    const nothing = !STOPS[chart.kind](chart, state).length;
    plot.classList.toggle("nothing", nothing);
    if (nothing) reader.go(null, []);
    else drawn.switch();
    fillLegend(legend, legendOf(chart, state), state, redraw);
  };
  const head = element("div", { class: "figure-head" }, element("h4", {}, chart.title), toolsFor(() => chart, () => alongAxis(whole, state.axis), state, table));
  const show = () => {
    chart = chosen(whole, state);
    says.textContent = chart.says;
    drawn.update(chart);
    fillLegend(legend, legendOf(chart, state), state, redraw);
    if (!table.hidden) table.replaceChildren(plainTable(dataOf(alongAxis(whole, state.axis))));
    else table.replaceChildren();
  };
  const switches = element("div", { class: "switches" });
  const allSwitches = () => [...switchesFor(whole, state, redraw), ...choosersFor(whole, state, show)];
  const fillSwitches = () => switches.replaceChildren(...allSwitches());
  fillSwitches();
  put(figure, {}, [head, says, switches, legend, plot, status, table]);
  fillLegend(legend, legendOf(chart, state), state, redraw);
  figure.close = () => drawn.close();
  figure.update = (next) => {
    whole = next;
    if (switches.children.length !== allSwitches().length) fillSwitches();
    show();
  };
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
  if (!roles.some((role) => (chart.hidden || []).includes(role))) return [];
  return roles.map((role) => {
    const box = element("input", { type: "checkbox", onchange: () => {
      if (box.checked) state.roles.delete(role);
      else state.roles.add(role);
      redraw();
    } });
    box.checked = !state.roles.has(role);
    return element("label", {}, box, role);
  });
}

// What is under the pointer, or where the arrow keys have gone. The plot itself marks the place.
function follow(plot, status, mark) {
  const tip = element("div", { class: "tip", hidden: true });
  plot.append(tip);
  let [view, stops, at] = [null, [], -1];
  const boxOf = (stop) => {
    const [left, top] = [view.origin()[0] + view.padding().left, view.origin()[1] + view.padding().top];
    const [x0, y0, x1, y1] = stop.box(view);
    return [x0 + left, y0 + top, x1 + left, y1 + top];
  };
  const show = (place, spoken) => {
    const stop = stops[place];
    if (!stop) return;
    at = place;
    mark(stop.at);
    const rows = stop.rows.slice(0, 14);
    tip.replaceChildren(
      element("strong", {}, stop.title),
      ...rows.map((row) => element("div", { class: "tip-row" }, row.colour ? swatch({ colour: row.colour, block: true }) : null, element("span", {}, row.name), element("b", {}, row.text))),
      ...(stop.rows.length > rows.length ? [element("div", {}, `and ${stop.rows.length - rows.length} more`)] : []),
    );
    tip.hidden = false;
    // Its width depends on where it stands.
    tip.style.left = "0";
    const [box, wide, high] = [boxOf(stop), tip.offsetWidth, tip.offsetHeight];
    const right = box[2] + 12 + wide <= plot.clientWidth;
    const beside = right || box[0] - 12 - wide >= 0;
    const x = right ? box[2] + 12 : Math.max(0, box[0] - 12 - wide);
    const y = beside ? Math.max(0, Math.min(box[1] + 6, plot.clientHeight - high)) : box[3] + 6;
    tip.style.left = `${Math.min(x, Math.max(0, plot.clientWidth - wide))}px`;
    tip.style.top = `${y}px`;
    if (spoken) status.textContent = `${stop.title}: ${stop.rows.map((row) => `${row.name} ${row.text}`).join(", ")}`;
  };
  const hide = () => {
    if (at >= 0) mark(null);
    tip.hidden = true;
    at = -1;
  };
  plot.onpointermove = (event) => {
    if (!view) return;
    const frame = plot.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const far = ([x0, y0, x1, y1]) => Math.hypot(Math.max(x0 - x, 0, x - x1), Math.max(y0 - y, 0, y - y1));
    let [best, least] = [-1, Infinity];
    stops.forEach((stop, place) => {
      const away = far(boxOf(stop));
      if (away < least) [best, least] = [place, away];
    });
    if (best !== at) show(best, false);
  };
  plot.onpointerleave = hide;
  plot.onblur = hide;
  plot.onkeydown = (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") hide();
    else if (event.key in steps && stops.length) {
      event.preventDefault();
      show(Math.max(0, Math.min(stops.length - 1, at + steps[event.key])), true);
    }
  };
  return {
    go: (now, places) => {
      [view, stops] = [now, places];
      hide();
    },
  };
}

// `current`: the chart as it is seen; `measured`: the same, never smoothed.
function toolsFor(current, measured, state, table) {
  const chart = current();
  const button = (name, title, action) => element("button", { type: "button", class: "tool", title, "aria-label": `${title}: ${chart.title}`, onclick: action }, name);
  const show = element("button", { type: "button", class: "tool", title: "Show the data as a table", "aria-expanded": "false", "aria-label": `Data of ${chart.title}`, onclick: () => {
    table.hidden = !table.hidden;
    show.setAttribute("aria-expanded", String(!table.hidden));
    if (!table.hidden && !table.firstChild) table.append(plainTable(dataOf(measured())));
  } }, "Data");
  return element("div", { class: "tools" }, show,
    button("CSV", "Save the data as CSV", () => save(`${chart.id}.csv`, new Blob([csvOf(dataOf(measured()))], { type: "text/csv" }))),
    button("SVG", "Save the plot as SVG", () => savePicture(current(), state, "svg")),
    button("PNG", "Save the plot as PNG", () => savePicture(current(), state, "png")),
  );
}

function plainTable(rows) {
  const most = 400;
  const body = rows.slice(1, most + 1).map((row) => element("tr", {}, ...row.map((value) => element("td", {}, value === null || value === undefined ? "" : value))));
  const left = rows.length - 1 - body.length;
  return element("div", {}, element("table", {}, element("thead", {}, element("tr", {}, ...rows[0].map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...body)), left > 0 ? element("p", {}, `${left} more rows are in the CSV file.`) : null);
}

async function savePicture(chart, state, form) {
  const { view, finalize } = await onPaper(chart, state);
  if (form === "svg") save(`${chart.id}.svg`, new Blob([await view.toSVG()], { type: "image/svg+xml" }));
  else {
    const canvas = await view.toCanvas(2);
    canvas.toBlob((blob) => save(`${chart.id}.png`, blob), "image/png");
  }
  finalize();
}
