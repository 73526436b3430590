// One trajectory, token by token.

const MODES = ["mask", "log-prob", "advantage", "version", "gap"];
const FOLD = 500; // characters of a prompt before it is folded to its end
const MAX_TOKENS = 4000; // of a block drawn at once
const LEAST_GAP = 1e-3; // nats; where all gaps are smaller, none is painted at full strength

function words(ids, spanning = {}) {
  return ids.map((place, i) => spanning[i] ?? index.vocabulary.texts[place]);
}

const contexts = (made) => [...(made.segments || []), made];

// The response as blocks of tokens with their numbers.
function blocks(made) {
  const found = [], texts = words(made.t, made.x), versions = made.v.flatMap(([version, count]) => Array(count).fill(version));
  let at = 0, mine = 0, trained = 0;
  made.turns.forEach((turn, n) => {
    for (const [kind, count] of [["sampled", turn.s], ["inserted", turn.i]]) {
      if (!count) continue;
      const tokens = [];
      for (let i = 0; i < count; i++, at++) {
        const token = { at, id: index.vocabulary.ids[made.t[at]], text: texts[at], kind };
        if (kind === "sampled") {
          token.logprob = milli(made.l[mine]);
          token.old = made.o ? milli(made.o[mine]) : null;
          token.gap = made.g ? made.g[mine] : null;
          token.version = versions[mine];
          mine++;
        }
        if (kind === "sampled" ? !turn.c?.[i] : turn.learn) token.advantage = milli(Array.isArray(made.a) ? made.a[trained++] : made.a);
        tokens.push(token);
      }
      found.push({ kind, turn, number: n + 1, tokens });
    }
  });
  return found;
}

const milli = (value) => (value === null || value === undefined ? null : value / 1000);
const isTrained = (token) => token.advantage !== null && token.advantage !== undefined;
const mix = (n, share) => `color-mix(in srgb, ${colour(n)} ${Math.round(100 * share)}%, transparent)`;
// A shade that says how much: --strength weakens it in the dark theme, where light text stands on it.
const graded = (n, share) => `color-mix(in srgb, ${colour(n)} calc(${Math.round(100 * share)}% * var(--strength)), transparent)`;

function shade(token, mode, scale) {
  if (token.kind === "prompt") return "";
  if (token.kind === "inserted" && mode !== "advantage") return mode === "mask" ? mix(1, 0.17) : "";
  switch (mode) {
    case "mask": return mix(2, 0.24);
    case "log-prob": return token.logprob === null ? "" : graded(3, 0.75 * Math.min(1, Math.sqrt(Math.max(0, -token.logprob) / 4)));
    case "advantage": return !isTrained(token) ? "" : graded(token.advantage >= 0 ? 0 : 1, 0.08 + 0.6 * Math.min(1, Math.abs(token.advantage) / scale.advantage));
    case "version": return mix(token.version - scale.version, 0.35);
    default: return token.gap === null ? "" : graded(4, 0.8 * Math.min(1, token.gap / scale.gap));
  }
}

function legendOf(mode, found, scale) {
  const swatch = (background, text) => el("span", {}, el("i", { style: `background:${background}` }), text);
  switch (mode) {
    case "mask": {
      const trained = (kind) => found.some((block) => block.kind === kind && block.tokens.some(isTrained));
      return [
        swatch(mix(2, 0.24), `sampled by the policy (${trained("sampled") ? "" : "not "}trained on)`),
        swatch(mix(1, 0.17), `inserted: tool results, template${trained("inserted") ? " (trained on)" : ""}`),
      ];
    }
    case "log-prob": return [0.9, 0.5, 0.1, 0.02].map((p) => swatch(graded(3, 0.75 * Math.min(1, Math.sqrt(-Math.log(p) / 4))), `p = ${p}`));
    case "advantage": return [swatch(graded(0, 0.68), `+${number(scale.advantage)}: made likelier`), swatch(graded(1, 0.68), `−${number(scale.advantage)}: made less likely`)];
    case "version": return [...new Set(found.flatMap((b) => b.tokens.map((t) => t.version)).filter((v) => v !== undefined))].map((v) => swatch(mix(v - scale.version, 0.35), `version ${v}`));
    default: return [swatch(graded(4, 0.8), `engine and learner ${number(scale.gap)} nats apart, or more`)];
  }
}

function scaleOf(found) {
  const all = found.flatMap((block) => block.tokens);
  const most = (values) => Math.max(0, ...values.filter((v) => v !== null && v !== undefined));
  return {
    advantage: most(all.map((t) => (isTrained(t) ? Math.abs(t.advantage) : null))) || 1,
    version: Math.min(...all.map((t) => t.version).filter((v) => v !== undefined)),
    gap: Math.max(LEAST_GAP, most(all.map((t) => t.gap))),
  };
}

function tokenTip(token, x, y) {
  const pairs = [["id", token.id], ["position", token.at === undefined ? "prompt" : token.at], ["kind", token.kind]];
  if (token.kind === "sampled") {
    pairs.push(["log-prob", token.logprob === null ? "–" : `${token.logprob.toFixed(3)} (p = ${number(Math.exp(token.logprob), 2)})`]);
    if (token.old !== null) pairs.push(["learner's", `${token.old.toFixed(3)} (gap ${number(token.gap, 2)})`]);
    pairs.push(["version", token.version]);
  }
  if (token.kind === "sampled" || isTrained(token)) pairs.push(["advantage", isTrained(token) ? token.advantage.toFixed(3) : "not trained on"]);
  tip.show(x, y, el("span", { class: "text" }, quoted(token.text) || "(part of the character before)"), table(pairs));
}

// A run of tokens; the arrow keys walk through it.
function tokenText(tokens, mode, scale, label) {
  const box = el("div", { class: "toks", tabindex: 0, role: "group", "aria-label": label });
  let drawn = 0, now = -1;
  const draw = () => {
    const part = document.createDocumentFragment();
    for (const end = Math.min(tokens.length, drawn + MAX_TOKENS); drawn < end; drawn++) {
      const span = el("span", { "data-n": drawn, class: tokens[drawn].kind === "sampled" ? null : "in" }, tokens[drawn].text);
      const background = shade(tokens[drawn], mode, scale);
      if (background) span.style.background = background;
      part.append(span);
    }
    box.append(part);
    if (drawn < tokens.length) box.append(el("button", { class: "more-text", onclick: (e) => { e.target.remove(); draw(); } }, `show more (${tokens.length - drawn} tokens left)`));
  };
  const point = (span) => {
    const place = span.getClientRects()[0] || span.getBoundingClientRect();
    tokenTip(tokens[+span.dataset.n], place.left - 14, place.bottom - 12);
  };
  box.addEventListener("mouseover", (event) => event.target.dataset.n && point(event.target));
  box.addEventListener("mouseleave", tip.hide);
  box.addEventListener("blur", () => { box.querySelector(".now")?.classList.remove("now"); tip.hide(); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    box.querySelector(".now")?.classList.remove("now");
    now = Math.max(0, Math.min(drawn - 1, now + move));
    const span = box.querySelector(`[data-n="${now}"]`);
    span.classList.add("now");
    span.scrollIntoView({ block: "nearest" });
    point(span);
  });
  draw();
  return box;
}

function turnCard(head, body, folds) {
  const card = el("section", { class: "turn" }, el("header", {}, head.map((part) => (part === null ? null : el("span", {}, part)))), body);
  if (folds) {
    const names = ["show less", "show the whole prompt"];
    const button = el("button", { class: "more-text" }, names[1]);
    const fold = () => { body.scrollTop = body.scrollHeight; }; // what it asks stands at its end
    button.addEventListener("click", () => { const folded = body.classList.toggle("folded"); button.textContent = names[+folded]; if (folded) fold(); });
    body.classList.add("folded");
    requestAnimationFrame(fold);
    card.append(button);
  }
  return card;
}

function promptCard(made) {
  const prompt = index.prompts[made.p], texts = words(prompt.ids, prompt.x);
  const tokens = texts.map((text, i) => ({ id: index.vocabulary.ids[prompt.ids[i]], text, kind: "prompt" }));
  return turnCard([el("b", {}, "prompt"), `${tokens.length} tokens`], tokenText(tokens, "mask", {}, "tokens of the prompt"), texts.join("").length > FOLD);
}

function turnHead(block) {
  const { turn } = block, calls = turn.calls || [];
  if (block.kind === "sampled") return [el("b", {}, `turn ${block.number}`), `${turn.s} sampled`, `ended: ${turn.stop}`, turn.cached ? `${turn.cached} cached` : null, turn.score === undefined ? null : `score ${number(turn.score)}`, turn.note || null];
  return [el("b", {}, calls.length ? "tool" : "inserted"), `${turn.i} inserted`, ...calls.map((call) =>
    el("span", {}, call.name || "(undecodable call)", ` ${number(call.seconds)} s `, call.error ? el("span", { class: "bad" }, call.error) : null))];
}

function tokenView(made, mode) {
  const found = blocks(made), scale = scaleOf(found);
  const cards = found.map((block) => {
    const label = block.kind === "sampled" ? `tokens of turn ${block.number}` : `tokens inserted after turn ${block.number}`;
    return turnCard(turnHead(block), tokenText(block.tokens, mode, scale, label), false);
  });
  if (made.session) return sessionView(made, mode);
  return [el("div", { class: "scale" }, legendOf(mode, found, scale)), promptCard(made), ...cards];
}

// A session of several contexts: which left which, and where; then their tokens.
function sessionView(made, mode) {
  const heads = made.session.map((segment, n) => el("h3", {}, `segment ${n + 1}`)), depth = [];
  const list = made.session.map((segment, n) => {
    depth[n] = segment.up < 0 ? 0 : depth[segment.up] + 1;
    const place = segment.after ? `after turn ${segment.after}` : "in the prompt";
    return el("li", { style: `margin-left:${22 * depth[n]}px` },
      el("button", { onclick: () => heads[n].scrollIntoView({ behavior: "smooth" }) }, `segment ${n + 1}`),
      ` ${segment.calls ? `calls ${segment.calls}` : `turns: ${segment.turns}`} · ${segment.trained} trained tokens (${percent(segment.share)})`,
      segment.up < 0 ? null : el("div", {}, `leaves segment ${segment.up + 1} ${place} (shared ids: ${segment.shared})`, segment.note ? `: ${segment.note}` : ""));
  });
  const parts = made.session.map((segment) => ({ ...contexts(made)[segment.at], session: undefined }));
  return [el("ul", { class: "session", "aria-label": "segments" }, list), ...parts.flatMap((part, n) => [heads[n], ...tokenView(part, mode)])];
}

// A group as a tree of turns: what its trajectories have in common stands once.

const NODE = { wide: 206, high: 42, across: 236, down: 52 };

function treeView(nodes, here, open) {
  const kids = nodes.map(() => []), roots = [];
  nodes.forEach((node, n) => (node.up < 0 ? roots : kids[node.up]).push(n));
  const depth = [], row = [];
  let leaves = 0;
  const place = (n, level) => {
    depth[n] = level;
    kids[n].forEach((kid) => place(kid, level + 1));
    row[n] = kids[n].length ? (row[kids[n][0]] + row[kids[n][kids[n].length - 1]]) / 2 : leaves++;
  };
  roots.forEach((root) => place(root, 0));
  const x = (n) => 4 + depth[n] * NODE.across, y = (n) => 4 + row[n] * NODE.down;
  const width = 12 + Math.max(...depth) * NODE.across + NODE.wide, height = 8 + leaves * NODE.down;
  const picture = svg("svg", { width, height, role: "tree", "aria-label": "turns of the group" });
  nodes.forEach((node, n) => {
    if (node.up < 0) return;
    const [x1, y1, x2, y2] = [x(node.up) + NODE.wide, y(node.up) + NODE.high / 2, x(n), y(n) + NODE.high / 2], half = (x1 + x2) / 2;
    picture.append(svg("path", { class: "edge", d: `M${x1} ${y1}C${half} ${y1} ${half} ${y2} ${x2} ${y2}` }));
  });
  const highest = Math.max(...nodes.flatMap((node) => node.at.map((at) => rows[at].reward)));
  const lowest = Math.min(...nodes.flatMap((node) => node.at.map((at) => rows[at].reward)));
  nodes.forEach((node, n) => picture.append(treeNode(node, x(n), y(n), lowest, highest, node.at.includes(here), open)));
  return el("div", {}, el("p", { class: "hint" }, `${leaves} ends. Equal beginnings stand once; the bar is the mean reward of what follows. Choose a node to read its trajectory.`), el("div", { class: "scroll" }, picture));
}

function treeNode(node, x, y, lowest, highest, here, open) {
  const mean = node.at.reduce((sum, at) => sum + rows[at].reward, 0) / node.at.length;
  const share = highest === lowest ? 0.5 : (mean - lowest) / (highest - lowest);
  const line = node.text.replace(/\s+/g, " ").trim();
  const target = (node.ends || node.at)[0];
  const go = () => { tip.hide(); open(target); };
  const group = svg("g", { class: here ? "node here" : "node", transform: `translate(${x} ${y})`, tabindex: 0, role: "treeitem", "aria-label": `turn ${node.turn}, mean reward ${number(mean)}` },
    svg("rect", { width: NODE.wide, height: NODE.high, rx: 7 }),
    svg("rect", { x: 0, y: NODE.high - 4, width: Math.max(3, NODE.wide * share), height: 4, rx: 2, style: `fill:${share > 0.5 ? "var(--good)" : share < 0.5 ? "var(--bad)" : "var(--faint)"};stroke:none` }),
    svg("text", { class: "what", x: 8, y: 16 }, line.length > 29 ? line.slice(0, 28) + "…" : line),
    svg("text", { class: "count", x: 8, y: 31 }, `turn ${node.turn} · ${node.n} tokens · ${number(mean)}` + (node.at.length > 1 ? ` of ${node.at.length}` : "")));
  group.addEventListener("mousemove", (event) => tip.show(event.clientX, event.clientY, el("span", { class: "text" }, node.text),
    table([["mean reward", number(mean)], ["sampled", node.n], ["trajectories", node.at.map((at) => rows[at].id).slice(0, 6).join(", ")]])));
  group.addEventListener("mouseleave", tip.hide);
  onActivation(group, go);
  return group;
}
