// The page: fills the header, connects the controls, draws everything once.
function setUpHeader() {
  report.runs.forEach((run, position) => {
    const card = make("li");
    card.style.borderLeftColor = `var(--run-${position % 6})`;
    const title = make("p");
    title.append(make("strong", run.name), make("span", run.precision, { class: "badge" }));
    card.append(title, make("p", run.about.join(" · ")), make("p", run.folder));
    element("runs").append(card);
  });
}

function chooseRun() {
  view.run = report.runs[Number(element("run").value)];
  const hasTensors = view.run.tensors !== null;
  element("scales-body").hidden = !hasTensors;
  element("scales-empty").textContent = hasTensors
    ? ""
    : `Nothing was logged about the tensors of ${view.run.name}: add lightning_fp8.ScaleFactorLogger to an FP8 run.`;
  for (const name of ["worst", "watchdog"]) {
    const old = tables.findIndex((table) => table.place === element(`${name}-table`));
    if (old >= 0) tables.splice(old, 1);
    showTable(`${name}-table`, view.run[name]);
  }
  if (hasTensors) {
    offerSorts();
    choose();
    drawScales();
  }
  drawRoles(view.run);
}

function offerSorts() {
  const choice = element("sort");
  const before = choice.value;
  choice.replaceChildren();
  for (const [name, { title, of, missing }] of Object.entries(SORTS)) {
    const isThere = !of || of(tensorsOf(view.run)).some(Number.isFinite);
    const option = make("option", isThere || !missing ? title : `${title}: add ${missing}`, { value: name });
    option.disabled = !isThere;
    choice.append(option);
  }
  choice.value = choice.querySelector(`option[value="${before}"]:not(:disabled)`) ? before : "model";
}

function chooseRows() {
  for (const table of tables) if (table.data.byLayer) table.draw();
  if (view.run.tensors === null) return;
  choose();
  drawScales();
}

function setUpControls() {
  report.runs.forEach((run, position) => element("run").append(make("option", run.name, { value: position })));
  const first = report.runs.findIndex((run) => run.tensors !== null);
  element("run").value = Math.max(first, 0);
  element("run-choice").hidden = report.runs.length < 2;
  for (const [name, { title }] of Object.entries(PLANES)) element("plane").append(make("option", title, { value: name }));
  for (const role of ROLES) {
    const label = make("label");
    const box = make("input", undefined, { type: "checkbox", value: role });
    box.checked = true;
    label.append(box, role);
    element("role-boxes").append(label);
    box.addEventListener("change", chooseRows);
  }
  let waiting = 0;
  element("filter").addEventListener("input", () => {
    // not at every keystroke
    clearTimeout(waiting);
    waiting = setTimeout(chooseRows, 120);
  });
  element("run").addEventListener("change", chooseRun);
  element("plane").addEventListener("change", drawScales);
  element("sort").addEventListener("change", chooseRows);
  element("previous").addEventListener("click", () => turnTo(view.first - pageSize()));
  element("next").addEventListener("click", () => turnTo(view.first + pageSize()));
}

function setUpTables() {
  showTables("layers-tables", (run) => [run.layers]);
  showTables("dtypes-tables", (run) => [run.dtypes, run.violations]);
  const { environment } = report.tables;
  showTable("environment-table", environment, Infinity);
  if (report.runs.length > 1 && environment.rows.length) {
    element("environment-note").textContent = "What differs is marked.";
  }
}

function setUp() {
  setUpHeader();
  setUpCurves();
  setUpControls();
  setUpTables();
  chooseRun();
  redraws.push(() => {
    if (view.run.tensors !== null) drawScales();
    drawRoles(view.run);
  });
  redrawAll();
  element("overview").on?.("plotly_click", ({ points: [point] }) => {
    const row = point.y * view.each;
    turnTo(row - (row % pageSize()));
  });
  // charts take their colours from the style sheet, which differs for dark pages and for print
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  matchMedia("print").addEventListener("change", redrawAll);
  document.body.dataset.ready = "yes";
}

setUp();
