// Elements, text and the floating tip. Text enters the page as text nodes only: it may be hostile.

const NS = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child instanceof Node ? child : visible(String(child)));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(NS, tag), attributes, children);
// What is no button by itself acts like one: by a click, Enter or the space bar.
function onActivation(node, action) {
  node.addEventListener("click", action);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    action();
  });
}

const byId = (id) => document.getElementById(id);

// What nobody sees is spelt out, as by utils/text.py's printable: it would control, hide or turn what stands beside it.
const PICTURES = "\\u00a9\\u00ae\\u203c\\u2049\\u2122\\u2139\\u2194-\\u21aa\\u231a-\\u23ff\\u24c2\\u25aa-\\u25fe\\u2600-\\u27bf\\u2934\\u2935\\u2b05-\\u2b55\\u3030\\u303d\\u3297\\u3299\\u{1f000}-\\u{1faff}";
const PART_OF_A_PICTURE = `(?<=[${PICTURES}])[\\ufe0e\\ufe0f]|(?<=[0-9#*])\\ufe0f(?=\\u20e3)|(?<=[${PICTURES}])\\u200d(?=[${PICTURES}])|(?<=[${PICTURES}]\\ufe0f)\\u200d(?=[${PICTURES}])`;
const UNSEEN = new RegExp(`${PART_OF_A_PICTURE}|[\\t\\n]|([\\p{Cc}\\p{Cf}\\p{Zl}\\p{Zp}\\p{Co}\\p{Cs}\\p{Default_Ignorable_Code_Point}])`, "gu");
function spelt(character) {
  const short = { "\t": "\\t", "\n": "\\n", "\r": "\\r" }[character];
  const number = character.codePointAt(0), digits = number.toString(16);
  return short ?? (number < 0x100 ? "\\x" + digits.padStart(2, "0") : number < 0x10000 ? "\\u" + digits.padStart(4, "0") : "\\U" + digits.padStart(8, "0"));
}
const visible = (text) => text.replace(UNSEEN, (character, unseen) => unseen === undefined ? character : spelt(unseen));
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
