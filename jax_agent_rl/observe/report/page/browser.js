// The list of trajectories with its filters, and the one that is looked at.

const ROW = 44;
const isNarrow = () => matchMedia("(max-width: 860px)").matches; // as in page.css

function browserPane() {
  const state = { mode: "mask", tree: false, chosen: null, found: [] };
  const values = (name) => [...new Set(rows.flatMap((row) => row[name]))].sort();
  const select = (label, options) => {
    const input = el("select", { "aria-label": label }, options.map(([value, text]) => el("option", { value }, text)));
    input.addEventListener("change", apply);
    return { input, label: el("label", { class: "filter" }, label, input) };
  };
  const entry = (type, placeholder, label) => {
    const input = el("input", { type, placeholder, step: "any", "aria-label": label });
    input.addEventListener("input", apply);
    return input;
  };
  const all = (names) => [["", "all"], ...names.map((name) => [name, name])];
  const split = select("split", all(values("split")));
  const steps = [entry("number", "from", "first step"), entry("number", "to", "last step")];
  const rewards = [entry("number", "least", "least reward"), entry("number", "most", "greatest reward")];
  const error = select("tool error", [["", "all"], ["none", "none"], ["any", "any"], ...values("errors").map((name) => [name, name])]);
  const finish = select("ended with", all(values("finish")));
  const stop = select("a turn stopped by", all(values("stops")));
  const sort = select("order", [["at", "as they came"], ["-reward", "best first"], ["reward", "worst first"], ["-sampled", "longest first"], ["-errors", "most tool errors"], ["-advantage", "largest advantage"]]);
  const text = entry("search", "text, id or group", "search");
  const pair = (label, inputs) => el("div", { class: "filter", role: "group", "aria-label": label }, label, el("span", { class: "pair" }, inputs));
  const count = el("span", { role: "status" });
  const list = el("div", { class: "rows", tabindex: 0, role: "listbox", "aria-label": "trajectories" });
  const view = el("div", { class: "view" });

  function fits(row) {
    const least = (input, value) => input.value === "" || value >= +input.value, most = (input, value) => input.value === "" || value <= +input.value;
    const wanted = error.input.value, search = text.value.toLowerCase();
    return (!split.input.value || row.split === split.input.value) && least(steps[0], row.step) && most(steps[1], row.step)
      && least(rewards[0], row.reward) && most(rewards[1], row.reward)
      && (!finish.input.value || row.finish === finish.input.value) && (!stop.input.value || row.stops.includes(stop.input.value))
      && (!wanted || (wanted === "none" ? !row.errors.length : wanted === "any" ? row.errors.length > 0 : row.errors.includes(wanted)))
      && (!search || row.id.toLowerCase().includes(search) || plain(row).includes(search));
  }

  function plain(row) { // decoded once, when somebody searches
    row.text ??= contexts(trajectory(row.at)).map((made) => words(made.t).join("")).join("\n").toLowerCase();
    return row.text;
  }

  function apply() {
    const order = sort.input.value, down = order.startsWith("-"), key = order.replace("-", "");
    const value = (row) => (key === "errors" ? row.errors.length : row[key] ?? -Infinity);
    state.found = rows.filter(fits);
    if (key !== "at") state.found.sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)) || a.at - b.at);
    count.textContent = `${state.found.length} of ${rows.length} trajectories`;
    list.scrollTop = 0;
    if (!state.found.some((row) => row.at === state.chosen)) choose(state.found[0]?.at ?? null);
    else drawList();
  }

  function drawList() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5), last = Math.min(state.found.length, first + Math.ceil((list.clientHeight || 900) / ROW) + 10);
    const spacer = el("div", { style: `height:${state.found.length * ROW}px` });
    list.replaceChildren(spacer, ...state.found.slice(first, last).map((row, i) => listRow(row, first + i)));
    const chosen = document.getElementById(`row-${state.chosen}`);
    if (chosen) list.setAttribute("aria-activedescendant", chosen.id);
    else list.removeAttribute("aria-activedescendant");
  }

  function listRow(row, n) {
    const attributes = {
      class: "row", role: "option", id: `row-${row.at}`, style: `top:${n * ROW}px`, onclick: () => open(row.at),
      "aria-selected": row.at === state.chosen ? "true" : "false", "aria-setsize": state.found.length, "aria-posinset": n + 1,
    };
    return el("div", attributes,
      el("div", {}, el("span", { class: "id" }, row.id), el("span", { class: "reward" }, number(row.reward))),
      el("div", { class: "under" }, el("span", {}, `step ${row.step}`), el("span", {}, `${row.turns} turn${row.turns === 1 ? "" : "s"}`), el("span", {}, `${row.sampled} tok`),
        row.errors.length ? el("span", { class: "bad" }, row.errors.join(", ")) : null, el("span", {}, row.finish)));
  }

  function choose(at) {
    state.chosen = at;
    drawList();
    const place = state.found.findIndex((row) => row.at === at);
    if (place >= 0) {
      list.scrollTop = Math.min(Math.max(list.scrollTop, (place + 1) * ROW - list.clientHeight), place * ROW);
      drawList();
    }
    drawView();
    if (at !== null) history.replaceState(null, "", "#trajectory=" + encodeURIComponent(rows[at].id));
  }

  // Choose what somebody pointed at: where the list stands above the trajectory, bring that into sight.
  function open(at) {
    choose(at);
    if (isNarrow()) view.scrollIntoView({ block: "start" });
  }

  function move(by) {
    moveTo(state.found.findIndex((row) => row.at === state.chosen) + by);
  }

  function moveTo(place) {
    const next = Math.max(0, Math.min(state.found.length - 1, place));
    if (state.found[next]) choose(state.found[next].at);
  }

  function walk(event) {
    const moves = { ArrowDown: () => move(1), ArrowUp: () => move(-1), Home: () => moveTo(0), End: () => moveTo(state.found.length - 1) };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  function drawView() {
    if (state.chosen === null) { view.replaceChildren(el("div", { class: "empty" }, rows.length ? "No trajectory passes the filters." : "No trajectory has been written yet.")); return; }
    const row = rows[state.chosen], made = trajectory(row.at);
    const nodes = index.forest[`${row.split}/${row.step}/${row.group}`];
    const known = { mask: true, "log-prob": true, advantage: made.a !== undefined, version: true, gap: Boolean(made.o) };
    const mode = known[state.mode] ? state.mode : "mask";
    const modes = el("div", { class: "modes", role: "group", "aria-label": "colour of tokens" }, MODES.map((name) =>
      el("button", { "aria-pressed": !state.tree && name === mode ? "true" : "false", disabled: !known[name], title: known[name] ? null : "this trajectory has no such values", onclick: () => { state.tree = false; state.mode = name; drawView(); } }, name)));
    const tree = el("div", { class: "modes" }, el("button", { "aria-pressed": state.tree ? "true" : "false", disabled: !nodes, title: nodes ? "the turns of its group" : "no other trajectory of its group is on this page", onclick: () => { state.tree = !state.tree; drawView(); } }, "tree"));
    const body = state.tree && nodes ? [treeView(nodes, row.at, (at) => { state.tree = false; choose(at); })] : tokenView(made, mode);
    const steps = el("div", { class: "modes" },
      el("button", { "aria-label": "previous trajectory", title: "previous trajectory (k)", onclick: () => move(-1) }, "‹"),
      el("button", { "aria-label": "next trajectory", title: "next trajectory (j)", onclick: () => move(1) }, "›"),
      el("button", { class: "narrow", onclick: () => list.scrollIntoView({ block: "center" }) }, "list"));
    view.replaceChildren(el("div", { class: "bar" }, el("h2", {}, row.id), modes, tree, steps), el("div", { class: "detail" }, factsOf(row, made), body));
  }

  list.addEventListener("scroll", drawList);
  list.addEventListener("keydown", walk);
  new ResizeObserver(drawList).observe(list);
  const reset = el("button", { onclick: () => { [...steps, ...rewards, text].forEach((i) => { i.value = ""; }); [split, error, finish, stop, sort].forEach((s) => { s.input.selectedIndex = 0; }); apply(); } }, "clear filters");
  const filters = el("div", { class: "filters", id: "filters" },
    el("label", { class: "filter" }, "search", text), sort.label, pair("step", steps), pair("reward", rewards), split.label, error.label, finish.label, stop.label);
  const unfold = el("button", { class: "narrow", "aria-controls": "filters", "aria-expanded": "false", onclick: () => {
    unfold.setAttribute("aria-expanded", filters.classList.toggle("open") ? "true" : "false");
  } }, "filters");
  const side = el("div", { class: "side" }, filters, el("div", { class: "status" }, count, unfold, reset), list);
  apply();
  return {
    pane: el("div", { class: "browser" }, side, view),
    choose, open, move,
    find: () => { filters.classList.add("open"); text.focus(); },
    colourBy: (n) => { state.tree = false; state.mode = MODES[n]; drawView(); },
    toggleTree: () => { state.tree = !state.tree; drawView(); },
    ofStep: (step) => { reset.click(); steps.forEach((input) => { input.value = step; }); apply(); },
  };
}

function factsOf(row, made) {
  const facts = made.facts, parts = Object.entries({ ...facts.parts, ...facts.tool_scores });
  const times = Object.entries(facts.seconds || {}).filter(([, value]) => value > 0);
  const took = times.map(([name, value]) => `${name.replace("_seconds", "")} ${seconds(value)}`).join(", ");
  const pairs = [
    ["reward", el("span", { class: "reward" }, number(row.reward, 4))], ["step", `${row.step} (${row.split})`], ["group", row.group], ["agent", facts.agent],
    ["data", facts.source], ["truth", facts.truth], ["advantage", row.advantage ?? undefined],
    ["ended with", row.finish], ["tokens", `${row.sampled} sampled, ${row.inserted} inserted`], ["segments", made.session?.length], ["tool calls", row.calls],
    ["tool errors", row.errors.length ? row.errors.join(", ") : undefined], ["no loss", facts.no_loss], ["branch of", row.parent ?? undefined],
    ...parts.map(([name, value]) => [name, number(value)]), ["took", took || undefined],
  ];
  return el("dl", { class: "facts-grid" }, pairs.filter(([, value]) => value !== undefined && value !== null).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}
