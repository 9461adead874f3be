// Elements and numbers. Text of a run reaches the page only as text nodes, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = [
  [],
  [7, 3],
  [2, 3],
  [9, 3, 2, 3],
  [5, 2, 5, 5],
  [1, 2],
  [12, 4],
  [3, 6],
  [9, 2, 2, 2, 2, 2],
  [6, 6],
];
const ICONS = { good: "✓", busy: "▶", bad: "✕", idle: "–" };

/** Create an element. `style` is an object, `on…` are listeners; null and false are left out. */
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") {
      for (const [property, text] of Object.entries(value))
        element.style.setProperty(property, text);
    } else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "checked" || name === "value") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return element;
}

/** A short line in the colour and the dashes of a line of a chart. */
function swatch(color, dash = []) {
  const svg = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "line");
  const size = { class: "swatch", width: 26, height: 10, "aria-hidden": "true" };
  const stroke = { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 2.5 };
  for (const [name, value] of Object.entries(size)) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries(stroke)) line.setAttribute(name, value);
  line.style.setProperty("stroke", color);
  if (dash.length) line.setAttribute("stroke-dasharray", dash.join(" "));
  svg.append(line);
  return svg;
}

const runColor = (index) => `var(--run-${index % 10})`;
const runDash = (index) => DASHES[index % DASHES.length];

/** A section with a heading; returns null if it would be empty. */
function section(id, title, ...children) {
  const content = children.flat(Infinity).filter(Boolean);
  if (!content.length) return null;
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    content,
  );
}

/** A table; each column is a heading, or [heading, "number"] for right-aligned numbers. */
function table(caption, columns, rows) {
  const classes = columns.map((column) => (Array.isArray(column) ? column[1] : null));
  const names = columns.map((column) => (Array.isArray(column) ? column[0] : column));
  const cell = (content, i) =>
    content instanceof HTMLTableCellElement
      ? content
      : el("td", { class: classes[i] }, content ?? "–");
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      null,
      el("caption", null, caption),
      el(
        "thead",
        null,
        el(
          "tr",
          null,
          names.map((name, i) => el("th", { scope: "col", class: classes[i] }, name)),
        ),
      ),
      el(
        "tbody",
        null,
        rows.map((row) => el("tr", null, row.map(cell))),
      ),
    ),
  );
}

/** A number for reading: four significant digits, or with a suffix such as 1.23M. */
function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return si(value);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** A large number with a suffix. */
function si(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"];
  let power = 0;
  let rest = Math.abs(value);
  while (rest >= 999.5 && power < units.length - 1) [rest, power] = [rest / 1000, power + 1];
  const text =
    rest >= 100 || Number.isInteger(rest) ? rest.toFixed(0) : String(Number(rest.toPrecision(3)));
  return (value < 0 ? "-" : "") + text + units[power];
}

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");
const count = (value) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en-US");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A duration such as 3 d 4 h, 2 h 05 min, 3 min 12 s, 4.2 s or 9.2 ms. */
function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds > 0 && seconds < 0.1) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [d, h, m, s] = [whole / 86400, (whole / 3600) % 24, (whole / 60) % 60, whole % 60].map(
    Math.floor,
  );
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${String(m).padStart(2, "0")} min`;
  return m ? `${m} min ${String(s).padStart(2, "0")} s` : `${s} s`;
}

function bytes(value) {
  return value === null || value === undefined ? "–" : `${si(value)}B`;
}

/** A moment as 2026-11-23 17:40, in the time zone of the reader. */
function moment(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const date = new Date(1000 * seconds);
  const two = (n) => String(n).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}`
  );
}

/** The index of the last element of a sorted array that is at most `value`; -1 if there is none. */
function lastUpTo(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
