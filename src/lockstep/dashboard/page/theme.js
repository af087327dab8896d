// Before anything is painted: a dark page must not flash white. The report's own button changes it later.
let chosen = "auto";
try { chosen = localStorage.getItem("lockstep-theme") || "auto"; } catch { /* no store: follow the system */ }
document.documentElement.dataset.theme = chosen === "auto" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : chosen;
