// The heat map: one page of tensors with their names, or all tensors without names.
const PLANES = {
  log2_scale: { of: "scale", title: "log2 of the scale", colours: "Viridis", unit: "", worst: "min" },
  headroom_bits: { of: "headroom_bits", title: "Headroom", colours: "Cividis", unit: " bits", worst: "min" },
  saturated_fraction: { of: "saturated_fraction", title: "Saturated share", colours: "Viridis", unit: "", worst: "max" },
  underflowed_fraction: { of: "underflowed_fraction", title: "Underflowed share", colours: "Viridis", unit: "", worst: "max" },
};
const SORTS = {
  model: { title: "model order" },
  headroom: { title: "lowest headroom", of: (tensors) => tensors.worst.headroom_bits, sign: 1 },
  saturated: { title: "most saturated", of: (tensors) => tensors.worst.saturated_fraction, sign: -1 },
  underflowed: { title: "most underflowed", of: (tensors) => tensors.worst.underflowed_fraction, sign: -1 },
  sqnr: { title: "lowest SQNR", of: (tensors) => tensors.sqnr, sign: 1, missing: "lightning_fp8.QuantizationProbe" },
};
const ROWS_WITHOUT_PAGES = 60;
const ROWS_OF_A_PAGE = 50;
const ROW_HEIGHT = 16;
const STRIPS = 200;

const view = { run: null, rows: [], first: 0 };

// Decoded at first use, as a report may hold several large runs.
function tensorsOf(run) {
  if (!run.decoded) {
    const { names, columns, planes, worst, sqnr } = run.tensors;
    const decoded = { names, columns, planes: {}, worst: {}, sqnr: single(sqnr) };
    for (const name of Object.keys(planes)) [decoded.planes[name], decoded.worst[name]] = [half(planes[name]), single(worst[name])];
    decoded.planes.log2_scale = decoded.planes.scale.map(Math.log2);
    decoded.roles = names.map((name) => name.slice(name.lastIndexOf(".") + 1));
    run.decoded = decoded;
  }
  return run.decoded;
}

function plane() {
  const name = element("plane").value;
  return { name, ...PLANES[name], values: tensorsOf(view.run).planes[name] };
}

function pageSize() {
  return view.rows.length <= ROWS_WITHOUT_PAGES ? ROWS_WITHOUT_PAGES : ROWS_OF_A_PAGE;
}

// Which rows are shown, in which order.
function choose() {
  const tensors = tensorsOf(view.run);
  const matches = matcher(element("filter").value);
  const roles = new Set([...document.querySelectorAll("#role-boxes input:checked")].map((box) => box.value));
  view.rows = [...tensors.names.keys()].filter((row) => roles.has(tensors.roles[row]) && matches(tensors.names[row]));
  const { of, sign } = SORTS[element("sort").value];
  if (of) {
    const key = of(tensors);
    // tensors without a number come last; equal ones keep the order of the model
    const place = (row) => (Number.isNaN(key[row]) ? Infinity : sign * key[row]);
    view.rows.sort((a, b) => (place(a) === place(b) ? a - b : place(a) - place(b)));
  }
  view.first = 0;
}

function drawScales() {
  const count = view.rows.length;
  const shown = view.rows.slice(view.first, view.first + pageSize());
  const all = tensorsOf(view.run).names.length;
  const range = count ? `${counted(view.first + 1)} to ${counted(view.first + shown.length)} of ${counted(count)}` : "none";
  element("rows").textContent = `${range}${count < all ? `, filtered from ${counted(all)}` : ""}`;
  element("previous").disabled = view.first === 0;
  element("next").disabled = view.first + shown.length >= count;
  for (const id of ["previous", "next"]) element(id).hidden = count <= pageSize();
  element("heatmap").hidden = !count;
  element("overview-body").hidden = count <= pageSize();
  const { name, values } = plane();
  element("plane-note").textContent = noteOn(name, values);
  if (count) drawHeatmap(shown);
  if (count > pageSize()) drawOverview();
}

function noteOn(name, values) {
  if (!values.some(Number.isFinite)) return "Nothing of it was logged.";
  const [first, last] = tensorsOf(view.run).columns;
  const several = first.some((step, column) => step !== last[column]);
  if (!several) return "";
  return name === "log2_scale"
    ? "A column covers several logged steps and shows the last of them."
    : "A column covers several logged steps and shows the worst of them.";
}

function ticks() {
  const [first] = tensorsOf(view.run).columns;
  const wanted = element("heatmap").clientWidth < 600 ? 3 : 8;
  const every = Math.max(1, Math.ceil(first.length / wanted));
  const at = first.map((_, column) => column).filter((column) => column % every === 0);
  return { tickmode: "array", tickvals: at, ticktext: at.map((column) => counted(first[column])), title: { text: "step" } };
}

function stepText(column) {
  const [first, last] = tensorsOf(view.run).columns;
  return first[column] === last[column] ? `step ${first[column]}` : `steps ${first[column]} to ${last[column]}`;
}

// Rows of numbers -> a trace. The colour scale covers all tensors, so that filters do not change it.
function heat(z, names, chosen) {
  const columns = [...tensorsOf(view.run).columns[0].keys()];
  const known = chosen.values.filter(Number.isFinite);
  const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const number = chosen.worst === "max" ? ".3~%" : ".4~g";
  return {
    type: "heatmap",
    x: columns,
    y: [...z.keys()],
    z,
    customdata: names.map((row) => row.map((name, column) => [plain(name), stepText(column)])),
    hovertemplate: `%{customdata[0]}<br>%{customdata[1]}: %{z:${number}}${chosen.unit}<extra></extra>`,
    hoverongaps: false,
    zmin: low,
    zmax: high > low ? high : low + 1,
    colorscale: chosen.colours,
    colorbar: {
      orientation: "h", y: 1, yanchor: "bottom", x: 0.5, len: 1, thickness: 9, outlinewidth: 0, ypad: 6,
      title: { text: chosen.title + chosen.unit.replace(" ", ", "), side: "top" },
      tickformat: chosen.worst === "max" ? "~%" : "",
    },
  };
}

// On a narrow screen roles are abbreviated, to leave room for the block's number.
function labelOf(name) {
  const width = element("heatmap").clientWidth;
  if (width >= 600) return shortened(name, Math.min(46, Math.floor((width * 0.36) / 6.4)));
  return shortened(name.replace(/\.grad_output$/, ".grad"), 24);
}

function drawHeatmap(shown) {
  const chosen = plane();
  const { names, columns } = tensorsOf(view.run);
  const width = columns[0].length;
  const z = shown.map((row) => finite(chosen.values.subarray(row * width, (row + 1) * width)));
  draw(element("heatmap"), [heat(z, shown.map((row) => columns[0].map(() => names[row])), chosen)], {
    height: shown.length * ROW_HEIGHT + 98,
    margin: { l: 10, r: 14, t: 20, b: 42 },
    // so that the height of a row does not depend on the titles
    xaxis: { ...ticks(), showgrid: false, zeroline: false, automargin: false },
    yaxis: {
      range: [shown.length - 0.5, -0.5],
      tickmode: "array",
      tickvals: [...shown.keys()],
      ticktext: shown.map((row) => plain(labelOf(names[row]))),
      tickfont: { size: 11 },
      showgrid: false,
      zeroline: false,
    },
    plot_bgcolor: colour("gap"),
  });
}

// One row for several tensors: each column shows the worst of them, with its name.
function drawOverview() {
  const chosen = plane();
  const { names, columns } = tensorsOf(view.run);
  const width = columns[0].length;
  const each = Math.ceil(view.rows.length / STRIPS);
  const sign = chosen.worst === "min" ? 1 : -1;
  const [z, worst] = [[], []];
  for (let start = 0; start < view.rows.length; start += each) {
    const members = view.rows.slice(start, start + each);
    const best = columns[0].map((_, column) => {
      let found = members[0];
      for (const row of members) {
        const [a, b] = [sign * chosen.values[row * width + column], sign * chosen.values[found * width + column]];
        if (a < b || !Number.isFinite(b)) found = row;
      }
      return found;
    });
    z.push(finite(best.map((row, column) => chosen.values[row * width + column])));
    worst.push(best.map((row) => names[row]));
  }
  const lowest = chosen.worst === "min" ? "lowest" : "highest";
  element("overview-note").textContent =
    (each > 1 ? `A line covers ${each} tensors and shows the ${lowest} number among them. ` : "") +
    "The frame is the page above; a click goes to another.";
  const trace = { ...heat(z, worst, chosen), showscale: false };
  const [from, to] = [view.first / each - 0.5, Math.min(view.first + pageSize(), view.rows.length) / each - 0.5];
  draw(element("overview"), [trace], {
    height: 300,
    margin: { l: 10, r: 14, t: 8, b: 42 },
    xaxis: { ...ticks(), showgrid: false, zeroline: false, automargin: false },
    yaxis: { range: [z.length - 0.5, -0.5], showticklabels: false, ticks: "", showgrid: false, zeroline: false },
    plot_bgcolor: colour("gap"),
    shapes: [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: from, y1: to, line: { color: series(1), width: 2 } }],
  });
  view.each = each;
}

function turnTo(first) {
  view.first = Math.max(0, Math.min(first, view.rows.length - 1));
  drawScales();
}
