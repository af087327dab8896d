// Seen from another machine, the dashboard asks for its token once; a cookie lets the page in from then on.

bar();
document.body.classList.add("list");
byId("top").append(element("h1", {}, "This dashboard needs its token"));
const problem = element("p", { class: "problem", role: "alert" });
const field = element("input", { type: "password", autocomplete: "off", required: true, autofocus: true });

async function enter(given) {
  try {
    await send("/api/enter", {}, given);
    keepToken(given);
    location.reload();
  } catch (error) {
    problem.textContent = error.message;
    keepToken("");
  }
}

byId("main").append(element("form", { class: "enter", onsubmit: (event) => { event.preventDefault(); enter(field.value.trim()); } },
  element("p", {}, "Open the whole address that 'lockstep dashboard' printed at its terminal, or paste the part behind '#token=' here."),
  element("label", { class: "field" }, "Token", field), problem, element("div", { class: "choices" }, element("button", { type: "submit" }, "Enter"))));
if (token()) enter(token());
