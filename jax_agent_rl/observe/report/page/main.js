// The head, the three panes, the theme and the keyboard.

function headOf(run, tabs) {
  const themeButton = el("button", { class: "icon", "aria-label": "light or dark theme", title: "light or dark theme (l)", onclick: toggleTheme }, "◐");
  const helpButton = el("button", { class: "icon", "aria-label": "list of keys", title: "list of keys (?)", onclick: showKeys }, "?");
  const arrow = (pair, format) => (pair[0] === pair[1] ? format(pair[1]) : `${format(pair[0])} → ${format(pair[1])}`);
  const tiles = [
    ["step", run.steps ? `${run.step} of ${run.steps}` : run.step],
    run.reward ? ["training reward", arrow(run.reward, number)] : null,
    run.accuracy ? ["held-out accuracy", arrow(run.accuracy, percent)] : null,
    ...Object.entries(run.accounting).map(([name, value]) => [name.replace("_", " "), value.toLocaleString("en")]),
  ];
  byId("head").replaceChildren(
    el("div", { class: "title" },
      el("h1", {}, run.name),
      el("span", { class: "badge" }, run.state),
      el("span", { class: "facts" }, Object.values(run.facts).join(" · ")),
      el("span", { class: "right" }, el("span", { class: "facts" }, `created ${run.created}`), themeButton, helpButton)),
    el("div", { class: "tiles" }, tiles.filter(Boolean).map(([name, value]) => el("div", { class: "tile" }, el("b", {}, String(value)), el("span", {}, name)))),
    index.notes.length ? el("ul", { class: "notes" }, index.notes.map((note) => el("li", {}, note))) : "",
    tabs,
  );
}

// Tabs as WAI-ARIA describes them: one of them is in the Tab order, arrow keys, Home and End move between them.
// A panel is made when it is first shown.
function tabsOf(panes, onShow) {
  const list = el("nav", { role: "tablist", "aria-label": "parts of the report" });
  const made = new Set();
  const tabs = panes.map(([name, title]) =>
    el("button", { role: "tab", id: "tab-" + name, "aria-controls": "panel-" + name, onclick: () => show(name) }, title));
  const panels = panes.map(([name]) =>
    el("div", { role: "tabpanel", class: "panel", id: "panel-" + name, "aria-labelledby": "tab-" + name, hidden: true }));
  list.append(...tabs);
  byId("body").replaceChildren(...panels);

  function show(name) {
    panes.forEach(([other, , make], n) => {
      const isShown = other === name;
      tabs[n].setAttribute("aria-selected", isShown ? "true" : "false");
      tabs[n].tabIndex = isShown ? 0 : -1;
      panels[n].hidden = !isShown;
      if (isShown && !made.has(name)) {
        made.add(name);
        panels[n].append(make());
      }
    });
    onShow(name);
  }

  list.addEventListener("keydown", (event) => {
    const now = tabs.indexOf(document.activeElement);
    const places = { ArrowRight: now + 1, ArrowLeft: now - 1 + tabs.length, Home: 0, End: tabs.length - 1 };
    if (now < 0 || !(event.key in places)) return;
    event.preventDefault();
    const next = places[event.key] % tabs.length;
    show(panes[next][0]);
    tabs[next].focus();
  });
  return { list, show };
}

function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}

const showKeys = () => byId("help").showModal();

const KEYS = [
  ["1 2 3", "curves, timeline, trajectories"], ["j k", "next and previous trajectory"], ["/", "search"], ["c", "next colouring of tokens"],
  ["t", "tree of the group"], ["← →", "walk through the tokens of a turn (Tab goes to the next turn), through these tabs, or through the steps of a chart (Enter opens them)"], ["↑ ↓", "walk through the list of trajectories"], ["l", "light or dark"], ["?", "this list"],
];

function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  let browser = null, colouring = 0;
  const opened = () => { tabs.show("trajectories"); return browser; };
  const panes = [
    ["curves", "Curves", () => chartsPane((step) => opened().ofStep(step))],
    ["timeline", "Timeline", () => timelinePane((at) => opened().open(at))],
    ["trajectories", `Trajectories ${rows.length.toLocaleString("en")}`, () => { browser = browserPane(); return browser.pane; }],
  ];
  const tabs = tabsOf(panes, (name) => {
    tip.hide();
    if (name !== "trajectories") history.replaceState(null, "", "#" + name);
  });
  headOf(index.run, tabs.list);
  const keysOf = (keys) => keys.split(" ").flatMap((key) => [el("kbd", {}, key), " "]);
  const rowsOfKeys = KEYS.map(([keys, what]) => el("tr", {}, el("td", {}, keysOf(keys)), el("td", {}, what)));
  const close = el("form", { method: "dialog" }, el("p", {}, el("button", { class: "icon" }, "close")));
  byId("help").replaceChildren(el("h2", { id: "keys" }, "Keys"), el("table", {}, rowsOfKeys), close);
  const actions = {
    1: () => tabs.show("curves"), 2: () => tabs.show("timeline"), 3: () => opened(), l: toggleTheme, "?": showKeys,
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
  else tabs.show(panes.some(([known]) => known === name) ? name : index.charts.length || !rows.length ? "curves" : "trajectories");
}

start();
