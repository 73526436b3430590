// Curves over training steps. Pointing at a step shows it in every chart; a click opens its trajectories.

const WIDE = 400, HIGH = 170, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;

function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * base).find((m) => m >= raw);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(12));
  return found;
}

function yScale(chart) {
  const values = chart.kind === "stack"
    ? [0, ...chart.lines[0].x.map((_, i) => chart.lines.reduce((sum, line) => sum + line.y[i], 0))]
    : chart.lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])]);
  const place = (low, high, f) => (v) => TOP + (HIGH - TOP - BOTTOM) * (1 - (f(v) - low) / (high - low || 1));
  const positive = values.filter((v) => v > 0);
  if (chart.scale === "log" && positive.length) {
    const low = Math.floor(Math.log10(Math.min(...positive))), high = Math.ceil(Math.log10(Math.max(...positive)));
    const top = high === low ? low + 1 : high, stride = Math.ceil((top - low) / 5);
    const marks = Array.from({ length: Math.floor((top - low) / stride) + 1 }, (_, i) => 10 ** (low + i * stride));
    return { at: place(low, top, (v) => Math.log10(Math.max(v, 10 ** low))), marks, label: (v) => v.toExponential(0) };
  }
  let low = Math.min(...values), high = Math.max(...values);
  if (chart.scale === "share") [low, high] = [Math.min(0, low), Math.max(1, high)]; // scores may leave 0 to 1
  else if (low >= 0 && low < 0.6 * high) low = 0;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const step = ticks(low, high, 4), stride = step.length > 1 ? step[1] - step[0] : high - low;
  [low, high] = [Math.floor(low / stride + 1e-9) * stride, Math.ceil(high / stride - 1e-9) * stride];
  const marks = ticks(low, high, 4);
  return { at: place(low, high, (v) => v), marks, label: chart.scale === "share" ? percent : (v) => number(v) };
}

function chartCard(chart, bounds, pointed, open) {
  const y = yScale(chart), [first, last] = bounds;
  const x = (step) => LEFT + (WIDE - LEFT - RIGHT) * (last === first ? 0.5 : (step - first) / (last - first));
  const show = chart.scale === "share" ? percent : (v) => number(v);
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}` });
  for (const mark of y.marks) {
    picture.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y.at(mark), y2: y.at(mark) }),
      svg("text", { x: LEFT - 6, y: y.at(mark) + 3.5, "text-anchor": "end" }, y.label(mark)),
    );
  }
  const steps = ticks(first, last, 5).filter(Number.isInteger);
  for (const step of steps) picture.append(svg("text", { x: x(step), y: HIGH - 6, "text-anchor": "middle" }, String(step)));
  if (chart.kind === "stack") drawStack(chart, picture, x, y.at, chart.every * (WIDE - LEFT - RIGHT) / (last - first + 1));
  else chart.lines.forEach((line, n) => drawLine(line, n, picture, x, y.at));
  const cross = svg("line", { class: "cross", y1: TOP, y2: HIGH - BOTTOM, visibility: "hidden" });
  picture.append(cross);
  const values = chart.lines.map((line) => el("b", {}, show(line.y[line.y.length - 1])));
  const legend = el("div", { class: "legend" }, chart.lines.map((line, n) =>
    el("span", {}, el("i", { style: `background:${colour(n)}` }), line.name + " ", values[n])));
  pointed.push((step) => {
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cross.setAttribute("x1", x(step)); cross.setAttribute("x2", x(step)); }
    chart.lines.forEach((line, n) => {
      const at = step === null ? line.y.length - 1 : placeOf(line, step);
      values[n].textContent = at < 0 ? "–" : show(line.y[at]);
    });
  });
  const drawn = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect(), place = (event.clientX - box.left) / box.width * WIDE;
    const wanted = first + (place - LEFT) / (WIDE - LEFT - RIGHT) * (last - first);
    return drawn.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), drawn[0]);
  };
  const pointTo = (step) => pointed.forEach((f) => f(step));
  picture.addEventListener("mousemove", (event) => {
    const step = stepAt(event);
    pointTo(step);
    tip.show(event.clientX, event.clientY, `step ${step}`);
  });
  picture.addEventListener("mouseleave", () => { pointTo(null); tip.hide(); });
  picture.addEventListener("click", (event) => { tip.hide(); open(stepAt(event)); });
  walkThroughSteps(picture, chart, drawn, pointTo, open);
  return el("figure", { class: "card" }, el("h2", {}, chart.title, chart.unit ? el("small", {}, chart.unit) : null),
    chart.hint ? el("p", {}, chart.hint) : null, picture, legend);
}

// The arrow keys, Home and End point to a step as the mouse does; Enter opens its trajectories.
function walkThroughSteps(picture, chart, drawn, pointTo, open) {
  let place = drawn.length - 1;
  const point = () => {
    const values = chart.lines.map((line) => [line.name, line.y[placeOf(line, drawn[place])]]);
    const known = values.filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${number(value)}`);
    picture.setAttribute("aria-valuenow", drawn[place]);
    picture.setAttribute("aria-valuetext", `step ${drawn[place]}: ${known.join(", ")}`);
    pointTo(drawn[place]);
  };
  const attributes = { tabindex: 0, role: "slider", "aria-label": chart.title, "aria-valuemin": drawn[0], "aria-valuemax": drawn[place], "aria-valuenow": drawn[place] };
  for (const [name, value] of Object.entries(attributes)) picture.setAttribute(name, value);
  picture.addEventListener("focus", () => picture.matches(":focus-visible") && point());
  picture.addEventListener("blur", () => pointTo(null));
  picture.addEventListener("keydown", (event) => {
    const places = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: drawn.length - 1 };
    if (event.key === "Enter") open(drawn[place]);
    if (!(event.key in places)) return;
    event.preventDefault();
    place = Math.max(0, Math.min(drawn.length - 1, places[event.key]));
    point();
  });
}

// Of the step, or where not every step is drawn, of the nearest one; -1 if the line has none there.
function placeOf(line, step) {
  const at = line.x.reduce((best, other, i) => (Math.abs(other - step) < Math.abs(line.x[best] - step) ? i : best), 0);
  return Math.abs(line.x[at] - step) <= (line.reach || 0) ? at : -1;
}

function drawLine(line, n, picture, x, y) {
  const along = (values) => line.x.map((step, i) => `${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`);
  if (line.low) {
    const band = [...along(line.high), ...along(line.low).reverse()].join(" ");
    picture.append(svg("polygon", { points: band, fill: colour(n), opacity: 0.14 }));
  }
  picture.append(svg("polyline", { points: along(line.y).join(" "), fill: "none", stroke: colour(n), "stroke-width": 1.8, "stroke-linejoin": "round" }));
  if (line.x.length <= 40) line.x.forEach((step, i) => picture.append(svg("circle", { cx: x(step), cy: y(line.y[i]), r: 2.3, fill: colour(n) })));
}

function drawStack(chart, picture, x, y, room) {
  const width = Math.max(1, Math.min(16, room * 0.8));
  chart.lines[0].x.forEach((step, i) => {
    let sum = 0;
    chart.lines.forEach((line, n) => {
      if (!line.y[i]) return;
      const top = y(sum + line.y[i]), foot = y(sum);
      picture.append(svg("rect", { x: x(step) - width / 2, y: top, width, height: Math.max(0.5, foot - top), fill: colour(n), opacity: 0.85 }));
      sum += line.y[i];
    });
  });
}

function chartsPane(open) {
  if (!index.charts.length) return el("div", { class: "empty" }, "No step has been finished yet.");
  const steps = index.charts.flatMap((chart) => chart.lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
  const bounds = [Math.min(...steps), Math.max(...steps)], pointed = [];
  const cards = (more) => index.charts.filter((chart) => Boolean(chart.more) === more).map((chart) => chartCard(chart, bounds, pointed, open));
  const others = cards(true);
  const zeros = index.zeros.length ? el("p", { class: "hint" }, `0 at every step: ${index.zeros.join(", ")}.`) : null;
  const more = el("details", { class: "more" }, el("summary", {}, `${others.length} more metrics`), el("div", { class: "charts" }, others), zeros);
  return el("div", { class: "pane" }, el("div", { class: "charts" }, cards(false)), others.length || zeros ? more : null);
}

// When engine, learner and traced trajectories worked.

const PHASES = { rollout: 5, evaluate: 4, teach: 7, learn: 0, publish: 1, save: 6, wait: 3 };
const LEARNER_WAITS = ["rollout", "evaluate", "wait"]; // drawn pale in its row
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
    el("p", { class: "hint" }, "The learner's row shows what the trainer did, pale where the learner waited. The engines' row is as dark as they were busy with rollouts, and has the evaluations; a tick is new weights reaching them. " +
      (line.traces.length ? "Below, the traced trajectories." : "With trace.sinks: [files] in the configuration, trajectories are shown, too.")),
    el("div", { class: "tools" }, el("label", {}, "zoom ", zoom), legend("trainer", names, PHASES), legend("trajectories", spans, SPANS)), scroll);
}

function timelinePicture(line, width, open) {
  const height = 96 + 16 * line.traces.length, total = line.seconds || 1;
  const x = (time) => NAMES + (width - NAMES - 12) * time / total;
  const picture = svg("svg", { width, height, role: "group", "aria-label": "timeline" });
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
  for (const p of line.phases) block(p.from, p.to, 24, 22, colour(PHASES[p.name] ?? 7), LEARNER_WAITS.includes(p.name) ? 0.35 : 0.9, () => [el("b", {}, `${p.name} · step ${p.step}`), table(lasted(p.from, p.to))]);
  lane("engines", 54, 22);
  for (const e of line.engine) {
    if (e.name === "evaluate") {
      block(e.from, e.to, 54, 22, colour(PHASES.evaluate), 0.9, () => [el("b", {}, `engines · evaluation after step ${e.step}`), table(lasted(e.from, e.to))]);
    } else {
      const opacity = 0.12 + 0.8 * Math.min(1, e.busy);
      block(e.from, e.to, 54, 22, colour(2), opacity, () => [el("b", {}, `engines · step ${e.step}`), table([["busy", percent(e.busy)], ...lasted(e.from, e.to)])]);
    }
  }
  for (const time of line.updates) picture.append(svg("path", { d: `M${x(time)} 50v30m-4 0h8l-4 6z`, stroke: colour(1), fill: colour(1), "stroke-width": 1.2 }));
  line.traces.forEach((trace, n) => {
    const y = 94 + 16 * n, isOnPage = trace.at >= 0;
    const attributes = isOnPage ? { class: "name link", tabindex: 0, role: "link", "aria-label": `trajectory ${trace.id}` } : { class: "name" };
    const name = svg("text", { ...attributes, x: 0, y: y + 10 }, trace.id.length > 20 ? "…" + trace.id.slice(-19) : trace.id);
    if (isOnPage) onActivation(name, () => open(trace.at));
    picture.append(name);
    for (const s of trace.spans) {
      const whole = s.name === "run";
      block(s.from, s.to, whole ? y + 5 : y, whole ? 2 : 12, colour(SPANS[s.name] ?? 7), whole ? 0.5 : 0.85, () => [el("b", {}, s.name + (s.note ? ` · ${s.note}` : "")), table([["trajectory", trace.id], ...lasted(s.from, s.to)])]);
    }
  });
  for (const cut of line.cuts) picture.append(svg("line", { x1: x(cut), x2: x(cut), y1: 18, y2: height, stroke: "var(--bad)", "stroke-dasharray": "2 4" }));
  return picture;
}
