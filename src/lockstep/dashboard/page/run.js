// A run, a study, or runs beside each other: the report's own page, and above it what is live.

// Where a plot stands among the live ones; what a model is judged by has many names, and stands before its loss.
const place = (id) => ({ "loss-by-step": 0, step: 1, loss: 3, rate: 4 }[id] ?? 2);
const held = new Map();
let [drawnLive, reading, over, tries] = [false, false, false, 0];
let stream = null;

const note = element("p", { class: "reading", role: "status" }, "Reading the records …");
const reportAddress = () => (given.kind === "study" ? `/api/report?study=${encodeURIComponent(given.name)}` : addressOf("/api/report", given.runs || [given.name]));

async function showReport() {
  reading = true;
  note.textContent = "Reading the records …";
  note.hidden = false;
  try {
    const answer = await fetch(reportAddress());
    const text = await answer.text();
    if (!answer.ok) throw new Error(JSON.parse(text).error);
    for (const id of ["top", "contents", "main", "foot"]) byId(id).replaceChildren();
    byId("document").textContent = text;
    drawnLive = answer.headers.get("X-Lockstep-Live") === "1";
    drawReport();
    note.hidden = true;
  } catch (error) {
    note.textContent = `The report could not be made: ${error.message}`;
  }
  reading = false;
  if (over) finish();
}

// A report that was made while the run went on is made once more when it has ended: then it has all plots.
function finish() {
  if (reading || !(drawnLive || plots.childElementCount) || tries > 2) return;
  tries += 1;
  held.clear();
  plots.replaceChildren();
  plots.hidden = true;
  showReport();
}

// ---------------------------------------------------------------- a run

const plots = element("div", { class: "figures-grid", hidden: true });
const facts = element("div", { class: "strip-facts" });
const cause = element("p", { class: "cause" });
const ranks = element("div", { class: "ranks" });
const stopButton = element("button", { type: "button", class: "danger" }, "Stop …");
const whyNot = element("p", { class: "why-not" });
const strip = element("div", { class: "strip" }, facts);
const tail = element("pre", { class: "log", tabindex: "0", "aria-label": "The end of the log" }, "(nothing yet)");
const logRank = element("select", { "aria-label": "Whose log" });
const logBlock = element("details", { class: "cell" }, element("summary", {}, element("strong", {}, "Log"), element("span", { class: "gist" }, "what a rank has printed")), element("div", { class: "log-block" }, element("label", {}, "rank ", logRank), tail));
let now = null;

function drawState(state) {
  now = state;
  setClock(state.now);
  const { progress } = state;
  const underWay = state.state === "running" || state.state === "starting";
  const said = underWay ? [
    progress.step ? ["step", `${fixed(progress.step, 0)}${progress.steps ? ` of ${fixed(progress.steps, 0)}` : ""}`] : null,
    progress.epoch ? ["epoch", `${progress.epoch} of ${progress.epochs}`] : null,
    progress.loss ? ["loss, last 50 steps", written(progress.loss)] : null,
    progress.images_per_second ? ["rank 0", written(progress.images_per_second, "rate")] : null,
    ["sign of life", state.ranks.length ? age(Math.min(...state.ranks.map((rank) => rank.time))) : "none yet"],
  ] : [["since", age(state.since) || "–"]];
  fill(facts, badge(state.state), underWay && progress.step && progress.steps ? meter(progress.step, progress.steps, "Progress of the run") : null,
    ...said.filter(Boolean).map(([label, value]) => element("span", { class: "fact" }, element("span", { class: "label" }, label), " ", value)));
  cause.textContent = state.cause;
  stopButton.hidden = !underWay;
  stopButton.disabled = !state.stop;
  whyNot.textContent = underWay && !state.stop ? `Cannot be stopped from here: ${state.why_not}.` : "";
  drawRanks(state, underWay);
  if (state.state === "failed" || state.state === "stalled" || underWay) logBlock.open = logBlock.dataset.met ? logBlock.open : true;
  logBlock.dataset.met = "1";
}

function drawRanks(state, underWay) {
  ranks.hidden = !underWay || state.ranks.length < 2;
  if (ranks.hidden) return;
  ranks.replaceChildren(element("h3", {}, "Ranks"), element("ul", {}, ...state.ranks.slice(0, 64).map((rank) => element("li", {},
    element("strong", {}, `rank ${rank.rank}`), element("span", {}, rank.step ? `step ${fixed(rank.step, 0)}` : rank.state || "–"),
    element("span", {}, rank.waits ? "waits for the exchange" : "works"), element("span", {}, "sign of life ", age(rank.time))))));
}

// A plot under the pointer or with the focus is not taken away from its reader: it is drawn anew when they leave.
function showPlot(chart) {
  const old = plots.querySelector(`[id="${chart.id}"]`);
  if (old && (old.matches(":hover") || old.contains(document.activeElement))) {
    held.set(chart.id, chart);
    old.dataset.newer = "waits";
    return;
  }
  held.delete(chart.id);
  if (old) delete old.dataset.newer;
  if (old) old.update(chart);
  else {
    const after = [...plots.children].find((one) => place(one.id) > place(chart.id));
    plots.insertBefore(figureFor(chart), after || null);
  }
  plots.hidden = false;
}

function showHeld() {
  for (const chart of [...held.values()]) showPlot(chart);
}

function showLog({ rank, text, again }) {
  if (String(rank) !== logRank.value) return;
  const atEnd = tail.scrollHeight - tail.scrollTop - tail.clientHeight < 40;
  const most = 200000;
  tail.textContent = (again ? text : tail.textContent + text).slice(-most) || "(nothing)";
  if (atEnd || again) tail.scrollTop = tail.scrollHeight;
}

function ended() {
  stream.end();
  connection("");
  over = true;
  finish();
}

function openRun() {
  for (let rank = 0; rank < given.ranks; rank += 1) logRank.append(element("option", { value: rank }, rank));
  logRank.addEventListener("change", () => {
    tail.textContent = "(nothing yet)";
    stream.again();
  });
  stopButton.addEventListener("click", () => askToStop(given.name, now && now.study));
  for (const name of ["pointerleave", "focusout"]) plots.addEventListener(name, () => setTimeout(showHeld, 50));
  plots.addEventListener("pointerout", () => setTimeout(showHeld, 50));
  // The button stays where it is while the facts beside it change: it may have the focus.
  strip.append(stopButton, whyNot, cause);
  byId("live").append(strip, ranks, plots, logBlock, note);
  stream = follow(() => `/events/run?id=${encodeURIComponent(given.name)}&rank=${logRank.value || 0}`, { state: drawState, plot: showPlot, log: showLog, ended });
}

// ---------------------------------------------------------------- a study, and runs beside each other

function openStudy() {
  let [before, finished] = [null, 0];
  const again = element("button", { type: "button", class: "action", hidden: true, onclick: () => {
    before = finished;
    again.hidden = true;
    showReport();
  } });
  byId("live").append(strip, again, note);
  stream = follow(() => `/events/study?id=${encodeURIComponent(given.name)}`, { study: (line) => {
    if (!line) return;
    fill(facts, line.active ? badge("running") : line.done === line.planned ? badge("done") : null, meter(line.done, line.planned, "Progress of the study"),
      element("span", { class: "fact" }, `${line.done} of ${line.planned} runs`), line.failed ? element("span", { class: "fact" }, `${line.failed} failed`) : null, element("span", { class: "fact" }, `${line.cells} cells`),
      line.runs ? element("a", { href: `/?words=${encodeURIComponent(line.runs)}` }, "its runs") : null);
    finished = line.done + line.failed;
    if (before === null) before = finished;
    const more = finished - before;
    again.hidden = more <= 0;
    again.textContent = `${more} more run${more > 1 ? "s have" : " has"} ended: show`;
  } });
}

function openCompare() {
  byId("live").append(element("div", { class: "strip" }, element("button", { type: "button", class: "tool", onclick: showReport }, "Read again")), note);
}

bar(element("span", { class: "here" }, given.kind === "compare" ? "runs beside each other" : given.kind));
byId("top").append(element("h1", {}, given.name));
({ run: openRun, study: openStudy, compare: openCompare })[given.kind]();
showReport();
