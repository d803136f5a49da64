// The heat map: one page of tensors with their names, or all tensors without names.
const PLANES = {
  log2_scale: { title: "log2 of the scale", colours: "Viridis", unit: "", worst: "lowest", several: "last" },
  headroom_bits: { title: "Headroom", colours: "Cividis", unit: " bits", worst: "lowest", several: "worst" },
  saturated_fraction: { title: "Saturated share", colours: "Viridis", unit: "", worst: "highest", several: "worst" },
  underflowed_fraction: { title: "Underflowed share", colours: "Viridis", unit: "", worst: "highest", several: "worst" },
};
// by a quantity's worst number over the run
const SORTS = {
  model: { title: "model order" },
  headroom_bits: { title: "lowest headroom", sign: 1 },
  saturated_fraction: { title: "most saturated", sign: -1 },
  underflowed_fraction: { title: "most underflowed", sign: -1 },
  sqnr: { title: "lowest SQNR", sign: 1, missing: ": add lightning_fp8.QuantizationProbe" },
};
const ROWS_WITHOUT_PAGES = 60;
const ROWS_OF_A_PAGE = 50;
const ROW_HEIGHT = 16;
const STRIPS = 200;

// rows: the chosen tensors, in order; first: the first of them on this page; each: how many are one line of the overview
const view = { run: null, rows: [], first: 0, each: 1 };

// The chosen numbers, tensors x columns; decoded at first use, as a report may hold several large runs.
function plane() {
  const name = element("plane").value;
  const { tensors } = view.run;
  tensors.decoded ??= {};
  tensors.decoded[name] ??= half(tensors.planes[name.replace("log2_", "")]).map(name === "log2_scale" ? Math.log2 : Number);
  return { ...PLANES[name], values: tensors.decoded[name] };
}

function pageSize() {
  return view.rows.length > ROWS_WITHOUT_PAGES ? ROWS_OF_A_PAGE : ROWS_WITHOUT_PAGES;
}

function choose() {
  const { names, worst } = view.run.tensors;
  const matches = matcher(element("filter").value);
  const roles = [...element("role-boxes").querySelectorAll(":checked")].map((box) => `.${box.value}`);
  view.rows = [...names.keys()].filter((row) => matches(names[row]) && roles.some((role) => names[row].endsWith(role)));
  const sort = element("sort").value;
  if (sort !== "model") {
    // tensors without a number come last; equal ones keep the order of the model
    const place = (row) => (worst[sort][row] === null ? Infinity : SORTS[sort].sign * worst[sort][row]);
    view.rows.sort((a, b) => place(a) - place(b) || 0);
  }
  turnTo(0);
}

function turnTo(first) {
  view.first = Math.max(0, Math.min(first, view.rows.length - 1));
  drawScales();
}

function drawScales() {
  const count = view.rows.length;
  const shown = view.rows.slice(view.first, view.first + pageSize());
  const { names, columns: [starts, ends] } = view.run.tensors;
  const range = count ? `${counted(view.first + 1)} to ${counted(view.first + shown.length)} of ${counted(count)}` : "none";
  element("rows").textContent = `${range}${count < names.length ? `, filtered from ${counted(names.length)}` : ""}`;
  element("previous").disabled = view.first === 0;
  element("next").disabled = view.first + shown.length >= count;
  for (const id of ["previous", "next", "overview-body"]) element(id).hidden = count <= pageSize();
  element("heatmap").hidden = !count;
  const { values, several } = plane();
  element("plane-note").textContent = !values.some(Number.isFinite)
    ? "Nothing of it was logged."
    : ends.some((step, column) => step !== starts[column])
      ? `A column covers several logged steps and shows the ${several} of them.`
      : "";
  if (count) drawHeatmap(shown);
  if (count > pageSize()) drawOverview();
}

function drawHeatmap(shown) {
  drawMap(element("heatmap"), shown.map((row) => [row]), {}, {
    height: shown.length * ROW_HEIGHT + 98,
    margin: { l: 10, r: 14, t: 20, b: 42 },
    yaxis: {
      tickmode: "array",
      tickvals: [...shown.keys()],
      ticktext: shown.map((row) => plain(labelOf(view.run.tensors.names[row]))),
      tickfont: { size: 11 },
    },
  });
}

// One line for several tensors, and a frame around the page that is shown above.
function drawOverview() {
  view.each = Math.ceil(view.rows.length / STRIPS);
  const groups = [];
  for (let start = 0; start < view.rows.length; start += view.each) groups.push(view.rows.slice(start, start + view.each));
  const several = `A line covers ${view.each} tensors and shows the ${plane().worst} number among them. `;
  element("overview-note").textContent =
    (view.each > 1 ? several : "") + "The frame is the page above; a click goes to another.";
  const [y0, y1] = [view.first, Math.min(view.first + pageSize(), view.rows.length)].map((row) => row / view.each - 0.5);
  drawMap(element("overview"), groups, { showscale: false }, {
    height: 300,
    margin: { l: 10, r: 14, t: 8, b: 42 },
    yaxis: { showticklabels: false, ticks: "" },
    shapes: [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0, y1, line: { color: series(1), width: 2 } }],
  });
}

// A line for each group of tensors: a cell shows the worst of them, with its name.
function drawMap(place, groups, more, { yaxis, ...layout }) {
  const { values, worst, unit, title, colours } = plane();
  const { names, columns: [starts, ends] } = view.run.tensors;
  const isShare = worst === "highest";
  const valueOf = (row, column) => values[row * starts.length + column];
  const rank = (row, column) => (Number.isFinite(valueOf(row, column)) ? valueOf(row, column) * (isShare ? -1 : 1) : Infinity);
  const rows = groups.map((group) =>
    starts.map((_, column) => group.reduce((best, row) => (rank(row, column) < rank(best, column) ? row : best))),
  );
  // the colour scale covers all tensors, so that filters do not change it
  const known = values.filter(Number.isFinite);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const steps = starts.map((from, column) => (from === ends[column] ? `step ${from}` : `steps ${from} to ${ends[column]}`));
  const every = Math.ceil(starts.length / (place.clientWidth < 600 ? 3 : 8));
  const ticks = [...starts.keys()].filter((column) => column % every === 0);
  const map = {
    type: "heatmap",
    // null leaves a gap
    z: rows.map((line) => line.map((row, column) => (Number.isFinite(valueOf(row, column)) ? valueOf(row, column) : null))),
    customdata: rows.map((line) => line.map((row, column) => [plain(names[row]), steps[column]])),
    hovertemplate: `%{customdata[0]}<br>%{customdata[1]}: %{z:${isShare ? ".3~%" : ".4~g"}}${unit}<extra></extra>`,
    hoverongaps: false,
    zmin: low,
    zmax: high > low ? high : low + 1,
    colorscale: colours,
    colorbar: {
      orientation: "h", y: 1, yanchor: "bottom", x: 0.5, len: 1, thickness: 9, outlinewidth: 0, ypad: 6,
      title: { text: title + unit.replace(" ", ", "), side: "top" },
      tickformat: isShare ? "~%" : "",
    },
    ...more,
  };
  const bare = { showgrid: false, zeroline: false };
  const ticktext = ticks.map((column) => counted(starts[column]));
  draw(place, [map], {
    // so that the height of a row does not depend on the titles
    xaxis: { tickmode: "array", tickvals: ticks, ticktext, ...bare, automargin: false },
    yaxis: { range: [groups.length - 0.5, -0.5], ...bare, ...yaxis },
    plot_bgcolor: colour("gap"),
    ...layout,
  });
}

// The middle of a long name is left out. On a narrow screen roles are abbreviated, to leave room for the block's number.
function labelOf(name) {
  const width = element("heatmap").clientWidth;
  const text = width < 600 ? name.replace(/\.grad_output$/, ".grad") : name;
  const length = width < 600 ? 24 : Math.min(46, Math.floor((width * 0.36) / 6.4));
  const start = Math.floor((length - 1) * 0.45);
  return text.length <= length ? text : `${text.slice(0, start)}…${text.slice(text.length - (length - 1 - start))}`;
}
