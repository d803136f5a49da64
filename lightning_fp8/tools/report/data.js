// The report's data, and helpers that several parts of the page share.
const report = JSON.parse(document.getElementById("data").textContent);
const ROLES = ["input", "weight", "grad_output"];
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
const redraws = [];

const element = (id) => document.getElementById(id);
const counted = (number) => number.toLocaleString("en-US");

// bfloat16 numbers: the upper halves of float32 numbers
function half(base64) {
  const { buffer } = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Float32Array(Uint32Array.from(new Uint16Array(buffer), (upper) => upper << 16).buffer);
}

// An element with text, never with markup: a name may contain any characters.
function make(tag, text, attributes = {}, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Plotly interprets some markup in its texts.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Matches a part of a name, or the whole name against a pattern with * and ?, regardless of case.
function matcher(wanted) {
  const text = wanted.trim().toLowerCase();
  if (!/[*?]/.test(text)) return (name) => name.toLowerCase().includes(text);
  const pattern = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
  const whole = new RegExp(`^${pattern}$`, "s");
  return (name) => whole.test(name.toLowerCase());
}

// A colour of the style sheet, which differs for dark pages and for print.
function colour(name) {
  element("probe").style.color = `var(--${name})`;
  return getComputedStyle(element("probe")).color;
}

// Okabe and Ito's colours, lighter on a dark page
const series = (position) => colour(`run-${position % 6}`);

function draw(place, traces, { xaxis, yaxis, ...more }) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("text") }, namelength: -1 },
    margin: { l: 55, r: 12, t: 10, b: 40 },
    xaxis: { ...axis, title: { text: "step" }, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...more,
  };
  Plotly.react(place, traces, layout, CONFIG);
}
