// Decodes the report's data; helpers that several parts of the page share.
const report = JSON.parse(document.getElementById("data").textContent);
const ROLES = ["input", "weight", "grad_output"];

const element = (id) => document.getElementById(id);

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)).buffer;
}

// float32 numbers
function single(base64) {
  return new Float32Array(bytesOf(base64));
}

// the upper halves of float32 numbers
function half(base64) {
  return new Float32Array(Uint32Array.from(new Uint16Array(bytesOf(base64)), (upper) => upper << 16).buffer);
}

// null leaves a gap in a chart
function finite(values) {
  return Array.from(values, (value) => (Number.isFinite(value) ? value : null));
}

// An element with text, never with markup: a name may contain any characters.
function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Plotly interprets some markup in its texts.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function shortened(text, length) {
  if (text.length <= length) return text;
  const start = Math.floor((length - 1) * 0.45);
  return text.slice(0, start) + "…" + text.slice(text.length - (length - 1 - start));
}

function counted(number) {
  return number.toLocaleString("en-US");
}

// Matches a part of a name, or the whole name against a pattern with * and ?, regardless of case.
function matcher(wanted) {
  const text = wanted.trim().toLowerCase();
  if (!/[*?]/.test(text)) return (name) => name.toLowerCase().includes(text);
  const pattern = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
  const whole = new RegExp(`^${pattern}$`, "s");
  return (name) => whole.test(name.toLowerCase());
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Okabe and Ito's colours, lighter on a dark page
function series(position) {
  return colour(`run-${position % 6}`);
}

const redraws = [];

function redrawAll() {
  for (const redraw of redraws) redraw();
}

function layout(more) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const { xaxis, yaxis, ...others } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("text") }, namelength: -1 },
    margin: { l: 55, r: 12, t: 10, b: 40 },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...others,
  };
}

const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

function draw(place, traces, more) {
  Plotly.react(place, traces, layout(more), CONFIG);
}
