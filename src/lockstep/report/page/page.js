// The page from its document: header, contents, findings, table, plots, settings, commands.

const report = JSON.parse(document.getElementById("document").textContent);
const SECTIONS = {
  factor: ["Side by side", "What each one came to."],
  learning: ["Learning curves", "How accuracy and loss went."],
  pace: ["Over time", "How fast it went, and what it took, while it trained."],
  speed: ["Speed and cost", "What more workers bring, and what they cost."],
  step: ["Where the time goes", "The parts of a step, and what is lost on the way to the ideal speed-up."],
  exchange: ["What an exchange costs", "Messages of any size, on every backend that was measured here."],
  timeline: ["Timeline", "A few steps, rank by rank."],
  proof: ["Step by step", "What the ranks and the one process came to, and what rounding may do."],
};
const links = [];

function section(prefix, name, title, about, ...content) {
  const id = prefix + name;
  links.push([id, title]);
  return element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), about ? element("p", { class: "about" }, about) : null, ...content);
}

function findingCard(said, definitions) {
  const cost = said.cost >= 0.005 ? element("span", { class: "cost", title: "Share of the training time that would be saved without it" }, `${fixed(100 * said.cost, said.cost < 0.1 ? 1 : 0)} % of the time`) : null;
  const definition = definitions[said.question];
  return element("article", { class: `finding ${said.question === "failed" || said.question === "state" ? "trouble" : ""}` },
    element("div", { class: "finding-head" }, element("span", { class: "question" }, said.question), cost),
    element("p", { class: "verdict" }, said.verdict),
    said.why ? element("p", { class: "why" }, element("span", { class: "tag" }, "why"), said.why) : null,
    said.next ? element("p", { class: "next" }, element("span", { class: "tag" }, "next"), said.next) : null,
    definition ? element("details", { class: "definition" }, element("summary", {}, "how this is known"), element("p", {}, definition)) : null,
  );
}

function headlineCard(certain) {
  const lines = certain.map((said) => element("li", {}, element("span", { class: "verdict" }, said.verdict), said.why ? element("span", { class: "figures" }, said.why) : null, said.next ? element("span", { class: "figures" }, `Next: ${said.next}`) : null));
  return element("article", { class: "finding" }, element("div", { class: "finding-head" }, element("span", { class: "question" }, "in short")), element("ul", { class: "headlines" }, ...lines));
}

function findings(part, prefix) {
  const several = (part.findings || []).length > 1;
  const blocks = [];
  const trouble = (part.headlines || []).filter((said) => said.question === "failed");
  if (trouble.length) blocks.push(element("div", { class: "findings" }, ...trouble.map((said) => findingCard(said, report.definitions))));
  for (const [place, about] of (part.findings || []).entries()) {
    const cards = about.findings.map((said) => findingCard(said, report.definitions));
    if (!several) blocks.push(element("div", { class: "findings" }, ...cards));
    else {
      const [first] = about.findings;
      blocks.push(element("details", { class: "cell", open: place === 0 && !part.headlines }, element("summary", {}, element("strong", {}, about.name), element("span", { class: "gist" }, first.verdict)), element("div", { class: "findings" }, ...cards)));
    }
  }
  if (part.notes) blocks.push(element("div", { class: "notes" }, element("h3", {}, part.kind === "run" ? "What to know" : "What to know before comparing"), element("ul", {}, ...part.notes.map((note) => element("li", {}, note)))));
  return blocks.length ? section(prefix, "findings", "Findings", several ? "What was found in each cell. Open a cell for the reasons." : "The costliest first.", ...blocks) : null;
}

function comparison(part, prefix) {
  if (!part.table) return null;
  const claims = (part.published || []).filter((source) => source.claims.length).map((source) =>
    element("div", { class: "published" }, element("h3", {}, `Published: ${source.source}`), element("ul", {}, ...source.claims.map((claim) =>
      element("li", {}, element("span", { class: `badge ${claim.verdict.replaceAll(" ", "-")}` }, claim.verdict), " ", claim.text, claim.figures ? element("span", { class: "figures" }, ` (${claim.figures})`) : null, claim.why ? element("span", { class: "figures" }, `; ${claim.why}`) : null)))));
  return section(prefix, "comparison", part.table.title, part.table.says, sortable(part.table, part.table.rows.length > 5), ...claims);
}

// A value, and its interval behind it: on a line of its own where the table has no room beside it.
function valueOf(text) {
  const [, value, interval] = /^(.*?) (\([^()]*\))$/.exec(text) || [];
  return interval ? [element("span", {}, value), " ", element("span", {}, interval)] : [text];
}

// A table whose columns sort when their heads are pressed, and whose rows can be filtered by text.
function sortable(table, filtered) {
  const right = new Set(table.right || []);
  const cells = (row) => row.map((cell, i) => element(i ? "td" : "th", { class: `${right.has(i) ? "number" : ""} ${cell.faint ? "faint" : ""}`, scope: i ? null : "row" }, ...(right.has(i) ? valueOf(cell.text) : [cell.text]), ...(cell.notes || []).map((note) => element("small", {}, ...valueOf(note)))));
  const rows = table.rows.map((row) => ({ row, node: element("tr", {}, ...cells(row)) }));
  const body = element("tbody", {}, ...rows.map(({ node }) => node));
  let [by, up] = [-1, true];
  const heads = table.columns.map((name, i) => {
    const press = () => {
      [by, up] = [i, by === i ? !up : true];
      const key = ({ row }) => (row[i].value ?? (right.has(i) ? null : row[i].text));
      const ordered = [...rows].sort((a, b) => {
        const [one, two] = [key(a), key(b)];
        if (one === null || two === null) return (one === null) - (two === null);
        const order = typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true });
        return up ? order : -order;
      });
      body.replaceChildren(...ordered.map(({ node }) => node));
      heads.forEach((head, k) => head.setAttribute("aria-sort", k === i ? (up ? "ascending" : "descending") : "none"));
    };
    return element("th", { scope: "col", class: right.has(i) ? "number" : "", "aria-sort": "none" }, element("button", { type: "button", onclick: press }, name));
  });
  const count = element("span", { class: "count", role: "status" });
  const narrow = (event) => {
    const words = event.target.value.trim().toLowerCase();
    for (const { row, node } of rows) {
      const text = row.map((cell) => [cell.text, ...(cell.notes || [])].join(" ")).join(" ").toLowerCase();
      node.hidden = !text.includes(words);
    }
    count.textContent = words ? `${rows.filter(({ node }) => !node.hidden).length} of ${rows.length} rows` : "";
  };
  const csv = [table.columns.flatMap((name, i) => (right.has(i) ? [name, `${name}, in words`] : [name])), ...table.rows.map((row) => row.flatMap((cell, i) => (right.has(i) ? [cell.value, [cell.text, ...(cell.notes || [])].join("; ")] : [cell.text])))];
  return element("div", { class: "table-block" },
    element("div", { class: "table-tools" }, filtered ? element("label", {}, "Filter ", element("input", { type: "search", placeholder: "words in a row", oninput: narrow })) : null, count,
      element("button", { type: "button", class: "tool", "aria-label": `Save ${table.title} as CSV`, onclick: () => save(`${table.id}.csv`, new Blob([csvOf(csv)], { type: "text/csv" })) }, "CSV")),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, element("table", { class: "sortable" }, element("thead", {}, element("tr", {}, ...heads)), body)),
    table.below ? element("p", { class: "says" }, table.below) : null);
}

function simpleTable(table) {
  if (!table || !table.rows.length) return null;
  const cells = (row) => row.map((cell, i) => element(i ? "td" : "th", { scope: i ? null : "row" }, cell.text));
  return element("div", { class: "table-block" }, element("h3", {}, table.title), table.says ? element("p", { class: "says" }, table.says) : null,
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, element("table", {}, element("thead", {}, element("tr", {}, ...table.columns.map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...table.rows.map((row) => element("tr", {}, ...cells(row)))))));
}

// Rows of one run: there may be many, so they are folded away.
function tables(part, prefix) {
  if (!part.tables) return null;
  return section(prefix, "tables", "Epochs and ranks", "", ...part.tables.map((table) => element("details", { class: "cell" },
    element("summary", {}, element("strong", {}, table.title), element("span", { class: "gist" }, `${table.rows.length} row${table.rows.length === 1 ? "" : "s"}`)), table.says ? element("p", { class: "says" }, table.says) : null, sortable(table, false))));
}

function commandBlock(command) {
  const text = command.lines.join("\n");
  const copy = element("button", { type: "button", class: "tool", "aria-label": `Copy the command of ${command.name}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "copied";
    } catch {
      copy.textContent = "select it by hand";
    }
    setTimeout(() => { copy.textContent = "copy"; }, 2000);
  } }, "copy");
  return element("div", { class: "command" }, element("div", { class: "command-head" }, element("span", {}, command.name), copy), element("pre", { tabindex: "0" }, element("code", {}, text)));
}

// Two beside each other; one that has no neighbour is as wide as both.
function figuresOf(charts) {
  const found = charts.map(figureFor);
  const half = (i) => i >= 0 && i < charts.length && ["lines", "scatter"].includes(charts[i].kind);
  for (let i = 0; i < found.length; i += half(i) && half(i + 1) ? 2 : 1) found[i].classList.toggle("alone", !half(i + 1));
  return element("div", { class: "figures-grid" }, ...found);
}

function partOf(part, prefix, several) {
  if (several) links.push([`${prefix}part`, part.name, true]);
  const facts = element("dl", { class: "facts" }, ...(part.facts || []).map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value))));
  // The answer first, before any figure about how it was found.
  const certain = (part.headlines || []).filter((said) => said.question !== "failed");
  const answer = certain.length ? headlineCard(certain) : null;
  // In the order of the page: the contents are listed as they are made.
  const order = [findings(part, prefix), comparison(part, prefix)];
  for (const [name, [title, about]] of Object.entries(SECTIONS)) {
    const charts = (part.charts || []).filter((chart) => chart.section === name);
    if (charts.length) order.push(section(prefix, name, title, about, figuresOf(charts)));
  }
  order.push(tables(part, prefix));
  const settings = element("div", { class: "tables-grid" }, simpleTable(part.same), simpleTable(part.environment));
  order.push(section(prefix, "setup", "Settings and environment", "Recipe: what is computed. Placement: where.", simpleTable(part.settings), settings));
  order.push(section(prefix, "again", "How to do it again", "", ...(part.commands || []).map(commandBlock)));
  return element("div", { class: "part", id: `${prefix}part` }, element("div", { class: "part-head" }, several ? element("h1", {}, part.name) : null, part.about ? element("p", { class: "lead" }, part.about) : null, answer, facts), ...order);
}

function build() {
  const several = report.parts.length > 1;
  const when = new Date(report.written * 1000);
  const stamp = `${when.toISOString().slice(0, 16).replace("T", " ")} UTC`;
  document.getElementById("top").append(
    element("div", { class: "brand" }, element("span", { class: "logo", "aria-hidden": "true" }, "▮▮▮"), "Lockstep report"),
    several ? element("p", { class: "title" }, report.title) : element("h1", {}, report.title),
    element("div", { class: "top-tools" }, element("span", { class: "stamp" }, `${stamp}, Lockstep ${report.lockstep}`), themeButton()),
  );
  const main = document.getElementById("main");
  report.parts.forEach((part, place) => main.append(partOf(part, several ? `p${place + 1}-` : "", several)));
  document.getElementById("contents").append(element("ul", {}, ...links.map(([id, title, head]) => element("li", { class: head ? "head" : "" }, element("a", { href: `#${id}` }, title)))));
  document.getElementById("foot").append(element("p", {}, "Made from run folders by 'lockstep report'. Every plot can be saved as SVG, PNG and CSV; numbers carry six digits."));
}

build();
