// How numbers are written (the rules of report/units.py), and small helpers to build elements. Text is only ever set as text.

const STEPS = {
  seconds: [[1, 1, "s"], [1e-3, 1e-3, "ms"], [0, 1e-6, "µs"]],
  bytes: [[1e9, 1e9, "GB"], [1e6, 1e6, "MB"], [1e3, 1e3, "kB"], [0, 1, "B"]],
  binary: [[2 ** 30, 2 ** 30, "GiB"], [2 ** 20, 2 ** 20, "MiB"], [2 ** 10, 2 ** 10, "KiB"], [0, 1, "B"]],
  percent: [[0, 0.01, "%"]],
  times: [[0, 1, "×"]],
  rate: [[0, 1, "images/s"]],
  bandwidth: [[1, 1, "GB/s"], [0, 1e-3, "MB/s"]],
};

function unitFor(unit, size) {
  for (const [least, factor, name] of STEPS[unit] || []) {
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
  if (unit === "count") return fixed(value, 0);
  if (unit === "percent" || unit === "times") return fixed(value / factor, 2);
  return digits(value / factor, unit === "number" || unit === "rate" ? 4 : 3);
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
