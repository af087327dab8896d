// The list of studies and runs. The server filters, sorts and cuts into pages; this draws one page, and asks for another.

const COLUMNS = [
  ["id", "run"], ["state", "state"], ["created", "started"], ["model", "model and data"], ["ranks", "ranks", true], ["global_batch", "batch", true],
  ["epochs", "progress"], ...Object.entries(given.figures).map(([key, { label }]) => [key, label, true]),
];
const GROUPS = ["under way", "done", "failed", "cancelled", "planned", "damaged"];
const asked = new URLSearchParams(location.search);
const query = { words: asked.get("words") || "", state: asked.get("state") || "", sort: asked.get("sort") || "created", down: asked.get("down") !== "0", page: Number(asked.get("page")) || 1 };
const ticked = new Set(readTicks());
let shown = given;
let stream = null;

function readTicks() {
  try { return JSON.parse(sessionStorage.getItem("lockstep-ticked") || "[]"); } catch { return []; }
}

function words() {
  const found = new URLSearchParams();
  if (query.words) found.set("words", query.words);
  if (query.state) found.set("state", query.state);
  if (query.sort !== "created" || !query.down) found.set("sort", query.sort);
  if (!query.down) found.set("down", "0");
  if (query.page > 1) found.set("page", query.page);
  return found.toString();
}

function ask(change) {
  Object.assign(query, { page: 1 }, change);
  history.replaceState(null, "", words() ? `/?${words()}` : "/");
  stream.again();
}

const search = element("input", { type: "search", placeholder: "words of a run", value: query.words, "aria-label": "Filter by words in the name, state, model, data or launcher" });
let typing = 0;
search.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => ask({ words: search.value }), 200);
});
const groups = element("div", { class: "groups", role: "group", "aria-label": "Only runs that are" });
const count = element("span", { class: "count", role: "status" });
const compare = element("a", { class: "action" });
const untick = element("button", { type: "button", class: "tool", onclick: () => { ticked.clear(); tickedChanged(); draw(); } }, "untick all");
const body = element("tbody");
const studies = element("div", { class: "studies" });
const pager = element("div", { class: "pager", role: "navigation", "aria-label": "Pages of the list" });
const empty = element("p", { class: "empty", hidden: true });

// The best first, the newest, and the largest of what is neither good nor bad.
function best(key, number) {
  return given.figures[key] ? given.figures[key].better === "more" : number || key === "created";
}

const heads = COLUMNS.map(([key, label, number]) => element("th", { scope: "col", class: `${number ? "number" : ""} col-${key}` },
  element("button", { type: "button", onclick: () => ask({ sort: key, down: query.sort === key ? !query.down : best(key, number) }) }, label)));

function tickedChanged() {
  try { sessionStorage.setItem("lockstep-ticked", JSON.stringify([...ticked])); } catch { /* until the page is closed */ }
  compare.textContent = ticked.size ? `Compare ${ticked.size} run${ticked.size > 1 ? "s" : ""}` : "Tick runs to compare them";
  if (ticked.size) compare.setAttribute("href", addressOf("/compare", ticked));
  else compare.removeAttribute("href");
  compare.setAttribute("aria-disabled", String(!ticked.size));
  untick.hidden = !ticked.size;
}

function progressOf(row) {
  if (row.state !== "running" && row.state !== "starting") return row.epochs ? `${row.epochs} epoch${row.epochs > 1 ? "s" : ""}` : "–";
  if (!row.step) return "starting";
  return element("span", { class: "progress" }, row.steps ? meter(row.step, row.steps, `Progress of ${row.id}`) : null,
    element("small", {}, `${row.epoch ? `epoch ${row.epoch}, ` : ""}step ${fixed(row.step, 0)}${row.steps ? ` of ${fixed(row.steps, 0)}` : ""}`));
}

function rowOf(row) {
  const box = element("input", { type: "checkbox", "aria-label": `Compare ${row.id}`, "data-key": `tick ${row.id}`, onchange: () => {
    if (box.checked) ticked.add(row.id);
    else ticked.delete(row.id);
    tickedChanged();
  } });
  box.checked = ticked.has(row.id);
  const cells = {
    id: element("a", { href: addressOf("/run", [row.id]), "data-key": `open ${row.id}` }, row.id),
    state: [badge(row.state), row.sign ? element("small", {}, "sign of life ", age(row.sign)) : null],
    created: age(row.created) || "–",
    model: row.model ? [row.model, element("small", {}, row.data)] : "–",
    ranks: written(row.ranks, "count"),
    global_batch: written(row.global_batch, "count"),
    epochs: progressOf(row),
    ...Object.fromEntries(Object.entries(given.figures).map(([key, { unit }]) => [key, written(row[key], unit)])),
  };
  return element("tr", { class: row.state === "damaged" ? "faint" : "" }, element("td", { class: "tick" }, box),
    ...COLUMNS.map(([key, , number], i) => element(i ? "td" : "th", { class: `${number ? "number" : ""} col-${key}`, scope: i ? null : "row" }, cells[key])));
}

function studyOf(line) {
  const parts = [`${line.done || 0} of ${line.planned} runs`, line.failed ? `${line.failed} failed` : "", `${line.cells} cells`].filter(Boolean).join(", ");
  return element("li", {}, element("a", { href: addressOf("/study", [line.name]), "data-key": `study ${line.name}` }, line.name),
    line.active ? badge("running") : null, meter(line.done, line.planned, `Progress of ${line.name}`), element("span", { class: "figures" }, parts, ", begun ", age(line.changed)),
    line.about ? element("span", { class: "lead" }, line.about) : null);
}

function drawStudies() {
  studies.replaceChildren();
  if (!shown.studies.length) return;
  const most = 6;
  const [first, rest] = [shown.studies.slice(0, most), shown.studies.slice(most)];
  studies.append(element("h2", {}, "Studies"), element("ul", {}, ...first.map(studyOf)));
  if (rest.length) studies.append(element("details", {}, element("summary", {}, `${rest.length} more`), element("ul", {}, ...rest.map(studyOf))));
}

function drawGroups() {
  const counts = shown.counts;
  const button = (state, label, number) => element("button", { type: "button", class: "group", "data-key": `group ${state}`, "aria-pressed": String(query.state === state), onclick: () => ask({ state }) }, label, element("b", {}, fixed(number, 0)));
  groups.replaceChildren(button("", "all", shown.all), ...GROUPS.filter((state) => counts[state] || query.state === state).map((state) => button(state, state, counts[state] || 0)));
}

function drawPager() {
  pager.hidden = shown.pages < 2;
  const go = (label, page, able) => element("button", { type: "button", class: "tool", disabled: !able, "data-key": label, onclick: () => ask({ page }) }, label);
  pager.replaceChildren(go("first", 1, shown.page > 1), go("previous", shown.page - 1, shown.page > 1), element("span", {}, `page ${fixed(shown.page, 0)} of ${fixed(shown.pages, 0)}`), go("next", shown.page + 1, shown.page < shown.pages), go("last", shown.pages, shown.page < shown.pages));
}

// What is drawn anew keeps the focus where it was.
function draw() {
  const key = document.activeElement && document.activeElement.dataset.key;
  setClock(shown.now);
  query.page = shown.page;
  drawStudies();
  drawGroups();
  drawPager();
  body.replaceChildren(...shown.rows.map(rowOf));
  heads.forEach((head, i) => head.setAttribute("aria-sort", COLUMNS[i][0] === query.sort ? (query.down ? "descending" : "ascending") : "none"));
  count.textContent = query.words || query.state ? `${fixed(shown.found, 0)} of ${fixed(shown.all, 0)} runs` : "";
  empty.hidden = shown.found > 0;
  empty.textContent = shown.all ? "No run has all of these words." : "There are no runs here yet. 'lockstep run' starts one, and it appears by itself.";
  const again = key && [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key);
  if (again) again.focus();
}

bar();
document.body.classList.add("list");
byId("top").append(element("h1", {}, "Runs and studies"), element("div", { class: "top-tools" }, element("code", {}, given.root), themeButton()));
byId("main").append(studies,
  element("div", { class: "runs" }, element("h2", {}, "Runs"), groups,
    element("div", { class: "table-tools" }, search, count, element("span", { class: "chosen" }, untick, compare)),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, element("table", { class: "sortable" }, element("thead", {}, element("tr", {}, element("th", { class: "tick", scope: "col" }, element("span", { class: "unseen" }, "compare")), ...heads)), body)),
    empty, pager));
byId("foot").append(element("p", {}, "Read from the run folders, every other second. Press a column's head to sort by it."));
tickedChanged();
draw();
stream = follow(() => `/events/list?${words()}`, { list: (view) => { shown = view; draw(); } });
