// What all pages share: the token, the bar at the top, following a stream, ages, and the question before a run is stopped.

const given = JSON.parse(document.getElementById("given").textContent);
const byId = (id) => document.getElementById(id);
const fill = (node, ...children) => { node.replaceChildren(); return put(node, {}, children); };
const STORE = "lockstep-token";
let kept = "";

// The address that the terminal prints carries the token behind '#', which is never sent; it goes from the address bar at once.
function takeToken() {
  if (!location.hash.startsWith("#token=")) return;
  keepToken(location.hash.slice(7));
  history.replaceState(null, "", location.pathname + location.search);
}

function keepToken(token) {
  kept = token;
  try { localStorage.setItem(STORE, token); } catch { /* no store: until the page is closed */ }
}

function token() {
  try { return kept || localStorage.getItem(STORE) || ""; } catch { return kept; }
}

async function send(path, content, used) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json", "X-Lockstep-Token": used }, body: JSON.stringify(content) });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

function addressOf(path, names) {
  const query = new URLSearchParams();
  for (const name of names) query.append("id", name);
  return `${path}?${query}`;
}

function bar(...more) {
  const state = element("span", { class: "connection", role: "status", id: "connection" });
  byId("bar").replaceChildren(
    element("a", { class: "brand", href: "/" }, element("span", { class: "logo", "aria-hidden": "true" }, "▮▮▮"), "Lockstep dashboard"), ...more, state);
}

function connection(text) {
  byId("connection").textContent = text;
}

// Streams are closed while nobody looks: a browser has few connections for one address, and the machine has runs to do.
function follow(address, on) {
  let source = null;
  let over = false;
  const close = () => {
    if (source) source.close();
    source = null;
  };
  const open = () => {
    if (source || over || document.hidden) return;
    source = new EventSource(address());
    for (const [name, act] of Object.entries(on)) source.addEventListener(name, (event) => act(JSON.parse(event.data)));
    source.onopen = () => connection("");
    source.onerror = () => {
      connection("Connection lost. Is 'lockstep dashboard' still there? Trying again …");
      if (source && source.readyState === EventSource.CLOSED) {
        close();
        setTimeout(open, 3000);
      }
    };
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
  return { again: () => { over = false; close(); open(); }, end: () => { over = true; close(); } };
}

// Ages are counted by the server's clock.
let skew = 0;
function setClock(now) {
  skew = now - Date.now() / 1000;
}

function ago(then) {
  const seconds = Math.max(0, Date.now() / 1000 + skew - then);
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${fixed(seconds / size, 0)} ${unit} ago`;
  return `${fixed(seconds, 0)} s ago`;
}

function age(then) {
  if (!then) return null;
  return element("time", { "data-at": then, title: new Date(then * 1000).toLocaleString() }, ago(then));
}

setInterval(() => document.querySelectorAll("time[data-at]").forEach((node) => {
  const text = ago(Number(node.dataset.at));
  if (node.textContent !== text) node.textContent = text;
}), 1000);

const MARKS = { done: "✓", failed: "✕", stalled: "✕", cancelled: "■", running: "●", starting: "◌", planned: "○", damaged: "?" };

function badge(state) {
  return element("span", { class: `state ${state in MARKS ? state : "other"}` }, element("span", { "aria-hidden": "true" }, MARKS[state] || "○"), state);
}

function meter(value, most, label) {
  return element("progress", { max: most || 1, value: Math.min(value || 0, most || 1), "aria-label": label });
}

function askToStop(name, study) {
  const field = element("input", { type: "password", autocomplete: "off", id: "token-field", required: true });
  const problem = element("p", { class: "problem", role: "alert" });
  const sure = element("button", { type: "submit", class: "danger" }, "Stop the run");
  const form = element("form", { method: "dialog" },
    element("h2", { id: "stop-title" }, "Stop this run?"),
    element("p", { class: "name" }, name),
    element("p", {}, "Its ranks are ended in order, as with Ctrl-C. What was measured so far is kept."),
    study ? element("p", {}, "A study is running it: the whole study stops. The same 'lockstep study run' goes on where it was.") : null,
    token() ? null : element("label", { class: "field" }, "Token, from the address that 'lockstep dashboard' printed", field),
    problem,
    element("div", { class: "choices" }, element("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Let it go on"), sure));
  const dialog = element("dialog", { "aria-labelledby": "stop-title", onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    sure.disabled = true;
    const used = token() || field.value.trim();
    try {
      await send("/api/stop", { id: name }, used);
      keepToken(used);
      dialog.close();
      connection("Asked to stop; it ends its ranks now …");
    } catch (error) {
      problem.textContent = error.message;
      if (error.message.startsWith("wrong token")) forgetToken(form, field, problem);
      sure.disabled = false;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}

// Of a dashboard that has ended: the field for another one takes its place.
function forgetToken(form, field, problem) {
  keepToken("");
  if (!field.isConnected) form.insertBefore(element("label", { class: "field" }, "Token, from the address that 'lockstep dashboard' printed", field), problem);
  field.focus();
}

takeToken();
addEventListener("hashchange", takeToken);
