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
  const line = visible(node.text.replace(/\s+/g, " ").trim());
  const target = (node.ends || node.at)[0];
  const go = () => { tip.hide(); open(target); };
  const group = svg("g", { class: here ? "node here" : "node", transform: `translate(${x} ${y})`, tabindex: 0, role: "treeitem", "aria-label": `turn ${node.turn}, mean reward ${number(mean)}` },
    svg("rect", { width: NODE.wide, height: NODE.high, rx: 7 }),
    svg("rect", { x: 0, y: NODE.high - 4, width: Math.max(3, NODE.wide * share), height: 4, rx: 2, style: `fill:${share > 0.5 ? "var(--good)" : share < 0.5 ? "var(--bad)" : "var(--faint)"};stroke:none` }),
    svg("text", { class: "what", x: 8, y: 16 }, line.length > 29 ? line.slice(0, 28) + "…" : line),
    svg("text", { class: "count", x: 8, y: 31 }, `turn ${node.turn} · ${node.n} tokens · ${number(mean)}` + (node.at.length > 1 ? ` of ${node.at.length}` : "")));
  group.addEventListener("mousemove", (event) => tip.show(event.clientX, event.clientY, el("span", { class: "text" }, visible(node.text)),
    table([["mean reward", number(mean)], ["sampled", node.n], ["trajectories", node.at.map((at) => rows[at].id).slice(0, 6).join(", ")]])));
  group.addEventListener("mouseleave", tip.hide);
  group.addEventListener("click", go);
  group.addEventListener("keydown", (event) => event.key === "Enter" && go());
  return group;
}
