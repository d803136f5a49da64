// Line charts over steps: the user's metrics of all runs, and the statistics of the tensors of each role.
const LINES = ["solid", "dash", "dot", "dashdot"];
const QUANTITIES = {
  headroom_bits: { title: "Headroom, bits", extreme: "min" },
  saturated_fraction: { title: "Saturated share", extreme: "max" },
  underflowed_fraction: { title: "Underflowed share", extreme: "max" },
};

function line(curve, more) {
  const values = finite(single(curve.values));
  return { x: curve.steps, y: values, type: "scatter", mode: curve.steps.length < 20 ? "lines+markers" : "lines", ...more };
}

function drawCurves() {
  const chosen = element("curve-key").value;
  const keys = chosen ? [chosen] : report.losses;
  const traces = report.runs.flatMap((run, position) =>
    keys.flatMap((key, which) => {
      if (!(key in run.curves)) return [];
      const style = { color: series(position), dash: LINES[which % LINES.length], width: 2 };
      return [line(run.curves[key], { name: plain(`${run.name} ${key}`), line: style, connectgaps: false })];
    }),
  );
  draw(element("curves-chart"), traces, {
    height: 380,
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "x unified",
    xaxis: { title: { text: "step" } },
    yaxis: { type: element("curve-log").checked ? "log" : "linear", title: { text: plain(keys.join(", ")) } },
  });
}

function setUpCurves() {
  if (!report.keys.length) {
    element("curves-controls").remove();
    element("curves-chart").remove();
  } else {
    const choice = element("curve-key");
    if (report.losses.length > 1) choice.append(make("option", report.losses.join(" and "), { value: "" }));
    for (const key of report.keys) choice.append(make("option", key, { value: key }));
    choice.addEventListener("change", drawCurves);
    element("curve-log").addEventListener("change", drawCurves);
    redraws.push(drawCurves);
  }
  showTable("finals-table", report.tables.finals);
}

function drawRoles(run) {
  const place = element("roles-charts");
  const found = Object.keys(QUANTITIES).filter((quantity) => quantity in run.roles);
  element("roles-note").textContent = found.length
    ? "Each role's median (solid) and worst tensor (dotted)."
    : `Nothing was logged about the tensors of ${run.name}: add lightning_fp8.ScaleFactorLogger to an FP8 run.`;
  // create all containers before the first chart: its width depends on their number
  place.replaceChildren(
    ...found.map((quantity) => {
      const attributes = { id: `roles-${quantity}`, class: "chart", role: "img", "aria-label": QUANTITIES[quantity].title };
      return make("div", undefined, attributes);
    }),
  );
  for (const quantity of found) {
    const { title, extreme } = QUANTITIES[quantity];
    draw(element(`roles-${quantity}`), roleLines(run.roles[quantity], extreme), {
      height: 290,
      title: { text: title, font: { size: 14 }, x: 0.02, xanchor: "left" },
      margin: { l: 50, r: 10, t: 36, b: 78 },
      showlegend: true,
      legend: { orientation: "h", y: -0.28, yanchor: "top", x: 0 },
      xaxis: { title: { text: "step", standoff: 4 } },
      // a share of zero throughout would be the middle of an axis from -100%
      yaxis: quantity === "headroom_bits" ? {} : { tickformat: "~%", rangemode: "tozero" },
    });
  }
}

function roleLines(roles, extreme) {
  return ROLES.filter((role) => role in roles).flatMap((role) => {
    const style = { color: series(ROLES.indexOf(role)), width: 2 };
    const group = { legendgroup: role };
    const median = line(roles[role].median, { ...group, name: role, line: style });
    const dotted = { ...style, dash: "dot", width: 1.5 };
    const worst = line(roles[role][extreme], { ...group, name: `${role}, ${extreme}`, line: dotted, showlegend: false });
    return [median, worst];
  });
}
