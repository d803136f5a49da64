// Line charts over steps: the user's metrics of all runs, and the statistics of the tensors of each role.
const DASHES = ["solid", "dash", "dot", "dashdot"];

function trace({ name, colour: position, style, steps, values }, more = {}) {
  const line = { color: series(position), dash: DASHES[style % DASHES.length], width: style === 2 ? 1.5 : 2 };
  const mode = steps.length < 20 ? "lines+markers" : "lines";
  return { type: "scatter", mode, name: plain(name), x: steps, y: values, line, ...more };
}

function drawCurves() {
  const chosen = element("curve-key").value;
  const keys = chosen ? [chosen] : report.losses;
  const lines = keys.flatMap((key, style) => report.curves[key].lines.map((line) => ({ ...line, style })));
  lines.sort((one, other) => one.colour - other.colour);
  // the same in the chart of each metric
  const { switches } = report.curves[keys[0]];
  draw(element("curves-chart"), lines.map((line) => trace(line)), {
    height: 380,
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "x unified",
    shapes: switches.map(({ step, colour: position }) => ({
      type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: series(position), width: 1, dash: "dot" },
    })),
    annotations: switches.map(({ step, label, colour: position }) => ({
      x: step, yref: "paper", y: 1, text: plain(label), textangle: -90, xanchor: "right", yanchor: "top", showarrow: false,
      font: { size: 11, color: series(position) },
    })),
    yaxis: { type: element("curve-log").checked ? "log" : "linear", title: { text: plain(keys.join(", ")) } },
  });
}

function setUpCurves() {
  const keys = Object.keys(report.curves);
  const choice = element("curve-key");
  for (const id of ["curves-controls", "curves-chart"]) element(id).hidden = !keys.length;
  if (!keys.length) return;
  if (report.losses.length > 1) choice.append(make("option", report.losses.join(" and "), { value: "" }));
  choice.append(...keys.map((key) => make("option", key, { value: key })));
  choice.addEventListener("change", drawCurves);
  element("curve-log").addEventListener("change", drawCurves);
  redraws.push(drawCurves);
}

function drawRoles({ name, roles }) {
  const charts = Object.entries(roles);
  element("roles-note").textContent = charts.length
    ? "Each role's median (solid) and worst tensor (dotted)."
    : `Nothing was logged about the tensors of ${name}: add lightning_fp8.ScaleFactorLogger to an FP8 run.`;
  // create all containers before the first chart: its width depends on their number
  element("roles-charts").replaceChildren(
    ...charts.map(([quantity, { title }]) =>
      make("div", "", { id: `roles-${quantity}`, class: "chart", role: "img", "aria-label": title }),
    ),
  );
  for (const [quantity, { title, is_share, lines }] of charts) {
    const traces = lines.map((line) => {
      const [role] = line.name.split(",");
      return trace(line, { legendgroup: role, showlegend: !line.style, name: line.style ? line.name : role });
    });
    draw(element(`roles-${quantity}`), traces, {
      height: 290,
      title: { text: title, font: { size: 14 }, x: 0.02, xanchor: "left" },
      margin: { l: 50, r: 10, t: 36, b: 78 },
      showlegend: true,
      legend: { orientation: "h", y: -0.28, yanchor: "top", x: 0 },
      xaxis: { title: { text: "step", standoff: 4 } },
      // a share of zero throughout would be the middle of an axis from -100%
      yaxis: is_share ? { tickformat: "~%", rangemode: "tozero" } : {},
    });
  }
}
