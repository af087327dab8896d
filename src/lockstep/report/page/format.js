// How numbers are written (by the table of lockstep/units.py, which is put in here), and small helpers to build elements. Text is only ever set as text.

const UNITS = {{units}};

function unitFor(unit, size) {
  for (const [least, factor, name] of UNITS[unit].steps) {
    if (Math.abs(size) >= least) return { factor, name };
  }
  return { factor: 1, name: "" };
}

function fixed(value, places) {
  return (Number(value.toFixed(places)) === 0 ? 0 : value).toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function digits(value, count) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-6 || size >= 1e15) return value.toExponential(count - 1);
  return fixed(value, Math.max(0, count - 1 - Math.floor(Math.log10(size))));
}

function bare(value, unit, factor) {
  const { digits: count, places } = UNITS[unit];
  return places === null ? digits(value / factor, count) : fixed(value / factor, places);
}

// Left out of the document, a unit is "number".
function written(value, unit = "number") {
  if (value === null || value === undefined) return "–";
  const { factor, name } = unitFor(unit, value);
  const text = bare(value, unit, factor);
  return name ? text + (unit === "times" ? "" : "\u00a0") + name : text;
}

// With its interval in the same unit: 10.2 s (9.98–10.4).
function between(value, low, high, unit = "number") {
  if (low === null || low === undefined || high === null || high === undefined) return written(value, unit);
  const { factor } = unitFor(unit, value);
  return `${written(value, unit)} (${bare(low, unit, factor)}–${bare(high, unit, factor)})`;
}

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return node;
}

function element(name, attributes, ...children) {
  return put(document.createElement(name), attributes, children);
}

// Paper does not scroll: a table that is wider than a page is made smaller. A4 with the margins of the style has this many dots across.
const PAPER = 700;
function fitPaper(printing) {
  document.documentElement.classList.toggle("paper", printing);
  for (const table of document.querySelectorAll(".scroll > table")) {
    table.style.width = "min-content";
    const wide = table.offsetWidth;
    table.style.width = "";
    table.style.zoom = printing && wide > PAPER ? String(PAPER / wide) : "";
  }
}

// Light, dark, or as the system is; plots listen for the event.
function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "auto";
  try { chosen = localStorage.getItem("lockstep-theme") || "auto"; } catch { /* a page from a file may have no store */ }
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("theme"));
  };
  const button = element("button", { type: "button", class: "tool", onclick: () => {
    chosen = { auto: "light", light: "dark", dark: "auto" }[chosen];
    try { localStorage.setItem("lockstep-theme", chosen); } catch { /* the same */ }
    apply();
  } });
  const apply = () => {
    show(chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen);
    button.textContent = `Theme: ${chosen}`;
  };
  dark.addEventListener("change", apply);
  // Paper is white, and what is folded away cannot be unfolded on it.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    show("light");
    unfolded = [...document.querySelectorAll("details.cell:not([open])")];
    for (const one of unfolded) one.open = true;
    fitPaper(true);
  });
  addEventListener("afterprint", () => {
    for (const one of unfolded) one.open = false;
    fitPaper(false);
    apply();
  });
  apply();
  return button;
}
