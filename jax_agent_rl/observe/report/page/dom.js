// Elements, text and the floating tip. Text enters the page as text nodes only: it may be hostile.

const NS = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(NS, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// Controls and direction marks made visible, so that no text hides or turns what stands beside it.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const code = (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");
const visible = (text) => text.replace(HIDDEN, code);
const quoted = (text) => visible(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(digits));
}

const percent = (value) => (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + " %";

function seconds(value) {
  const s = Math.round(value);
  if (value < 10) return number(value) + " s";
  if (s < 120) return s + " s";
  if (s < 7200) return Math.floor(s / 60) + " m " + String(s % 60).padStart(2, "0") + " s";
  return Math.floor(s / 3600) + " h " + String(Math.floor((s % 3600) / 60)).padStart(2, "0") + " m";
}

const colour = (n) => `var(--c${n % 8})`;

const tip = {
  show(x, y, ...content) {
    const box = byId("tip");
    box.replaceChildren(...content);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 8)) + "px";
    box.style.top = (y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18) + "px";
  },
  hide() { byId("tip").hidden = true; },
};

const table = (pairs) => el("table", {}, pairs.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, String(value)))));

const index = JSON.parse(byId("index").textContent);
const rows = index.rows.map((row, at) => Object.fromEntries([["at", at], ...index.columns.map((name, i) => [name, row[i]])]));

// One line a trajectory: read when it is looked at.
const lines = byId("trajectories").textContent.split("\n").slice(1, -1);
const trajectory = (at) => JSON.parse(lines[at].endsWith(",") ? lines[at].slice(0, -1) : lines[at]);
