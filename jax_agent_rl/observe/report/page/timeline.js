// When engine, learner and traced trajectories worked.

const PHASES = { rollout: 5, evaluate: 4, learn: 0, publish: 1, save: 6, wait: 3 };
const SPANS = { generate: 2, tool: 1, reward: 4, wait: 3, run: 5 };
const NAMES = 132;

function timelinePane(open) {
  const line = index.timeline;
  if (!line.phases.length && !line.traces.length) {
    return el("div", { class: "empty" }, "This run recorded no times: it was made by an older version, or has not finished a step.");
  }
  const scroll = el("div", { class: "scroll" });
  const zoom = el("input", { type: "range", min: 0, max: 6, step: 0.25, value: 0, "aria-label": "zoom" });
  const draw = () => scroll.replaceChildren(timelinePicture(line, Math.max(700, innerWidth - 110) * 2 ** zoom.value, open));
  zoom.addEventListener("input", draw);
  const names = [...new Set(line.phases.map((p) => p.name))];
  const spans = [...new Set(line.traces.flatMap((t) => t.spans.map((s) => s.name)))].filter((name) => name !== "run");
  const legend = (what, all, colours) => all.length ? el("span", { class: "legend" }, what, all.map((name) =>
    el("span", {}, el("i", { style: `background:${colour(colours[name] ?? 7)}` }), name))) : null;
  draw();
  return el("div", { class: "pane" },
    el("p", { class: "hint" }, "The learner's row shows what the trainer did; the engine's is as dark as the engines were busy; a tick is new weights reaching the engines. " +
      (line.traces.length ? "Below, the traced trajectories." : "With trace.sinks: [files] in the configuration, trajectories are shown, too.")),
    el("div", { class: "tools" }, el("label", {}, "zoom ", zoom), legend("trainer", names, PHASES), legend("trajectories", spans, SPANS)), scroll);
}

function timelinePicture(line, width, open) {
  const height = 96 + 16 * line.traces.length, total = line.seconds || 1;
  const x = (time) => NAMES + (width - NAMES - 12) * time / total;
  const picture = svg("svg", { width, height, role: "img", "aria-label": "timeline" });
  for (const mark of ticks(0, total, Math.max(4, Math.min(40, width / 110)))) {
    picture.append(svg("line", { class: "grid", x1: x(mark), x2: x(mark), y1: 18, y2: height }), svg("text", { x: x(mark), y: 12, "text-anchor": "middle" }, seconds(mark)));
  }
  const lane = (name, y, high) => picture.append(svg("text", { class: "name", x: 0, y: y + high / 2 + 4 }, name), svg("rect", { class: "lane", x: NAMES, y, width: width - NAMES - 12, height: high, rx: 3 }));
  const block = (from, to, y, high, fill, opacity, content) => {
    const rect = svg("rect", { x: x(from), y, width: Math.max(1, x(to) - x(from)), height: high, rx: 2, fill, opacity });
    rect.addEventListener("mousemove", (event) => tip.show(event.clientX, event.clientY, ...content()));
    rect.addEventListener("mouseleave", tip.hide);
    picture.append(rect);
  };
  const lasted = (from, to) => [["from", seconds(from)], ["lasted", seconds(to - from)]];
  lane("learner", 24, 22);
  for (const p of line.phases) block(p.from, p.to, 24, 22, colour(PHASES[p.name] ?? 7), p.name === "wait" || p.name === "rollout" ? 0.35 : 0.9, () => [el("b", {}, `${p.name} · step ${p.step}`), table(lasted(p.from, p.to))]);
  lane("engines", 54, 22);
  for (const e of line.engine) block(e.from, e.to, 54, 22, colour(2), 0.12 + 0.8 * Math.min(1, e.busy), () => [el("b", {}, `engines · step ${e.step}`), table([["busy", percent(e.busy)], ...lasted(e.from, e.to)])]);
  for (const time of line.updates) picture.append(svg("path", { d: `M${x(time)} 50v30m-4 0h8l-4 6z`, stroke: colour(1), fill: colour(1), "stroke-width": 1.2 }));
  line.traces.forEach((trace, n) => {
    const y = 94 + 16 * n, name = svg("text", { class: trace.at >= 0 ? "name link" : "name", x: 0, y: y + 10 }, trace.id.length > 20 ? "…" + trace.id.slice(-19) : trace.id);
    if (trace.at >= 0) name.addEventListener("click", () => open(trace.at));
    picture.append(name);
    for (const s of trace.spans) {
      const whole = s.name === "run";
      block(s.from, s.to, whole ? y + 5 : y, whole ? 2 : 12, colour(SPANS[s.name] ?? 7), whole ? 0.5 : 0.85, () => [el("b", {}, s.name + (s.note ? ` · ${visible(s.note)}` : "")), table([["trajectory", trace.id], ...lasted(s.from, s.to)])]);
    }
  });
  for (const cut of line.cuts) picture.append(svg("line", { x1: x(cut), x2: x(cut), y1: 18, y2: height, stroke: "var(--bad)", "stroke-dasharray": "2 4" }));
  return picture;
}
