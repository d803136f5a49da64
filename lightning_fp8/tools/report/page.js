// The page: fills the header, connects the controls, draws everything once.
function setUpHeader() {
  report.runs.forEach(({ name, precision, about, folder }, position) => {
    const title = make("p", "", {}, make("strong", name), make("span", precision, { class: "badge" }));
    const card = make("li", "", {}, title, make("p", about), make("p", folder));
    card.style.borderLeftColor = `var(--run-${position % 6})`;
    element("runs").append(card);
    element("run").append(make("option", name, { value: position }));
  });
  element("run").value = Math.max(0, report.runs.findIndex((run) => run.tensors));
  element("run-choice").hidden = report.runs.length < 2;
}

function chooseRun() {
  view.run = report.runs[element("run").value];
  const { name, tensors, worst, watchdog } = view.run;
  element("scales-body").hidden = !tensors;
  element("scales-empty").textContent = tensors
    ? ""
    : `Nothing was logged about the tensors of ${name}: add lightning_fp8.ScaleFactorLogger to an FP8 run.`;
  new Table(element("worst-table"), worst);
  new Table(element("watchdog-table"), watchdog);
  if (tensors) offerSorts(tensors.worst);
  chooseRows();
  drawRoles(view.run);
}

function offerSorts(worst) {
  for (const option of element("sort").options) {
    const { title, missing } = SORTS[option.value];
    option.disabled = worst[option.value]?.every((value) => value === null) ?? false;
    option.textContent = title + (option.disabled && missing ? missing : "");
  }
  if (element("sort").selectedOptions[0].disabled) element("sort").value = "model";
}

function chooseRows() {
  for (const table of tables.values()) if (table.byLayer) table.draw();
  if (view.run.tensors) choose();
}

function setUpControls() {
  for (const [id, choices] of Object.entries({ plane: PLANES, sort: SORTS })) {
    element(id).append(...Object.entries(choices).map(([name, { title }]) => make("option", title, { value: name })));
  }
  for (const role of ROLES) {
    const box = make("input", "", { type: "checkbox", value: role, checked: "" });
    box.addEventListener("change", chooseRows);
    element("role-boxes").append(make("label", "", {}, box, role));
  }
  let waiting = 0;
  element("filter").addEventListener("input", () => {
    // not at every keystroke
    clearTimeout(waiting);
    waiting = setTimeout(chooseRows, 120);
  });
  element("run").addEventListener("change", chooseRun);
  element("plane").addEventListener("change", drawScales);
  element("sort").addEventListener("change", choose);
  element("previous").addEventListener("click", () => turnTo(view.first - pageSize()));
  element("next").addEventListener("click", () => turnTo(view.first + pageSize()));
}

function setUp() {
  setUpHeader();
  setUpControls();
  setUpCurves();
  new Table(element("finals-table"), report.finals);
  showTables("layers-tables", (run) => [run.layers]);
  showTables("dtypes-tables", (run) => run.dtypes);
  new Table(element("environment-table"), report.environment);
  element("environment-note").hidden = report.runs.length < 2 || !report.environment.rows.length;
  chooseRun();
  redraws.push(() => {
    if (view.run.tensors) drawScales();
    drawRoles(view.run);
  });
  const redrawAll = () => redraws.forEach((redraw) => redraw());
  redrawAll();
  element("overview").on?.("plotly_click", ({ points: [point] }) => {
    const row = point.y * view.each;
    turnTo(row - (row % pageSize()));
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redrawAll);
  document.body.dataset.ready = "yes";
}

setUp();
