// The head, the three panes, the theme and the keyboard.

function headOf(run, panes, show) {
  const theme = el("button", { class: "icon", title: "light or dark (l)", onclick: toggleTheme }, "◐");
  const help = el("button", { class: "icon", title: "keys (?)", onclick: () => byId("help").showModal() }, "?");
  const arrow = (pair, format) => (pair[0] === pair[1] ? format(pair[1]) : `${format(pair[0])} → ${format(pair[1])}`);
  const tiles = [
    ["step", run.steps ? `${run.step} of ${run.steps}` : run.step],
    run.reward ? ["training reward", arrow(run.reward, number)] : null,
    run.accuracy ? ["held-out accuracy", arrow(run.accuracy, percent)] : null,
    ...Object.entries(run.accounting).map(([name, value]) => [name.replace("_", " "), value.toLocaleString("en")]),
  ];
  byId("head").replaceChildren(
    el("div", { class: "title" }, el("h1", {}, run.name), el("span", { class: "badge" }, run.state), el("span", { class: "facts" }, Object.values(run.facts).join(" · ")),
      el("span", { class: "right" }, el("span", { class: "facts" }, `created ${run.created}`), theme, help)),
    el("div", { class: "tiles" }, tiles.filter(Boolean).map(([name, value]) => el("div", { class: "tile" }, el("b", {}, String(value)), el("span", {}, name)))),
    index.notes.length ? el("ul", { class: "notes" }, index.notes.map((note) => el("li", {}, note))) : "",
    el("nav", { role: "tablist" }, panes.map(([name, title]) => el("button", { role: "tab", id: "tab-" + name, onclick: () => show(name) }, title))),
  );
}

function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}

const KEYS = [
  ["1 2 3", "curves, timeline, trajectories"], ["j k", "next and previous trajectory"], ["/", "search"], ["c", "next colouring of tokens"],
  ["t", "tree of the group"], ["← →", "walk through the tokens of a turn (Tab goes to the next turn)"], ["l", "light or dark"], ["?", "this list"],
];

function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const panes = [["curves", "Curves"], ["timeline", "Timeline"], ["trajectories", `Trajectories ${rows.length.toLocaleString("en")}`]];
  let browser = null, colouring = 0;
  const opened = () => { show("trajectories"); return browser; };
  const make = {
    curves: () => chartsPane((step) => opened().ofStep(step)),
    timeline: () => timelinePane((at) => opened().choose(at)),
    trajectories: () => { browser ??= browserPane(); return browser.pane; },
  };
  const made = {};
  function show(name) {
    tip.hide();
    made[name] ??= make[name]();
    byId("body").replaceChildren(made[name]);
    panes.forEach(([other]) => byId("tab-" + other).setAttribute("aria-selected", other === name ? "true" : "false"));
    if (name !== "trajectories") history.replaceState(null, "", "#" + name);
  }
  headOf(index.run, panes, show);
  const keysOf = (keys) => keys.split(" ").flatMap((key) => [el("kbd", {}, key), " "]);
  const rowsOfKeys = KEYS.map(([keys, what]) => el("tr", {}, el("td", {}, keysOf(keys)), el("td", {}, what)));
  const close = el("form", { method: "dialog" }, el("p", {}, el("button", { class: "icon" }, "close")));
  byId("help").replaceChildren(el("h2", {}, "Keys"), el("table", {}, rowsOfKeys), close);
  const actions = {
    1: () => show("curves"), 2: () => show("timeline"), 3: () => opened(), l: toggleTheme, "?": () => byId("help").showModal(),
    j: () => opened().move(1), k: () => opened().move(-1), "/": () => opened().find(), t: () => opened().toggleTree(),
    c: () => { colouring = (colouring + 1) % MODES.length; opened().colourBy(colouring); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  const wanted = decodeURIComponent(location.hash.slice(1)), [name, id] = wanted.split("=");
  const at = rows.findIndex((row) => row.id === id);
  if (at >= 0) opened().choose(at);
  else show(name in make ? name : "curves");
}

start();
