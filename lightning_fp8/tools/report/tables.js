// Tables: a click on a title sorts, and a filter selects layers. By the element that holds it:
const tables = new Map();

class Table {
  constructor(place, { columns, rows, note, by_layer }) {
    Object.assign(this, { place, rows, note, byLayer: by_layer, sortedBy: null, descending: false });
    this.columns = columns.map((title, column) => ({
      title: title.replace(/[<>]$/, ""),
      highFirst: title.endsWith(">"),
      isNumber: rows.some((row) => row[column][1] !== null),
    }));
    tables.set(place, this);
    this.draw();
  }

  sort(column) {
    const { highFirst, isNumber } = this.columns[column];
    this.descending = this.sortedBy === column ? !this.descending : highFirst;
    this.sortedBy = column;
    const sign = this.descending ? -1 : 1;
    this.rows.sort(({ [column]: [text, a] }, { [column]: [other, b] }) => {
      if (!isNumber) return sign * text.localeCompare(other, "en", { numeric: true });
      // rows without a number come last in both directions
      return a === null || b === null ? (a === null) - (b === null) : sign * (a - b);
    });
    this.draw();
    this.place.querySelectorAll("thead button")[column].focus();
  }

  draw() {
    const { place, note, rows } = this;
    place.replaceChildren(make("p", note, { class: rows.length ? "note" : "empty" }));
    if (!rows.length) return;
    const matches = matcher(this.byLayer ? element("filter").value : "");
    // a pattern may match a layer, or its tensors
    const shown = rows.filter(([[layer]]) => ["", ...ROLES.map((role) => `.${role}`)].some((role) => matches(layer + role)));
    const table = make("table");
    table.createTHead().append(this.head());
    table.createTBody().append(...shown.map((row) => this.line(row)));
    place.append(make("div", "", { class: "scrolled" }, table));
    if (!shown.length) place.append(make("p", "No layer matches the filter.", { class: "note" }));
  }

  cell(tag, column, content, attributes) {
    const cell = make(tag, "", attributes, content);
    cell.classList.toggle("number", this.columns[column].isNumber);
    return cell;
  }

  line(cells) {
    const made = cells.map(([text, , mark], column) => {
      const cell = column ? this.cell("td", column, text) : this.cell("th", column, text, { scope: "row" });
      cell.classList.toggle("mark", mark);
      return cell;
    });
    return make("tr", "", {}, ...made);
  }

  head() {
    const made = this.columns.map(({ title }, column) => {
      const button = make("button", title, { type: "button" });
      button.addEventListener("click", () => this.sort(column));
      const cell = this.cell("th", column, title ? button : "", { scope: "col" });
      if (this.sortedBy === column) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      return cell;
    });
    return make("tr", "", {}, ...made);
  }
}

// One table or more for each run, under its name where there are several.
function showTables(id, tablesOf) {
  for (const run of report.runs) {
    if (report.runs.length > 1) element(id).append(make("h3", run.name));
    for (const data of tablesOf(run)) new Table(element(id).appendChild(make("div")), data);
  }
}
