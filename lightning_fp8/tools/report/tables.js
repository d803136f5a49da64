// Tables: a click on a title sorts, a filter selects layers, and twenty rows are shown at first.
const ROWS_AT_FIRST = 20;
const tables = [];

function cellOf(cell) {
  return Array.isArray(cell) ? { text: cell[0], sort: cell[1], mark: cell[2] } : { text: cell, sort: null, mark: false };
}

class Table {
  constructor(place, data, limit = ROWS_AT_FIRST) {
    this.place = place;
    this.data = data;
    this.limit = limit;
    this.rows = data.rows.map((cells) => cells.map(cellOf));
    this.isNumber = data.columns.map((_, column) => this.rows.some((row) => row[column].sort !== null));
    this.sortedBy = null;
    this.descending = false;
    this.showsAll = false;
    tables.push(this);
    this.draw();
  }

  sort(column) {
    if (this.sortedBy === column) this.descending = !this.descending;
    else [this.sortedBy, this.descending] = [column, this.data.first[column] === "high"];
    const sign = this.descending ? -1 : 1;
    this.rows.sort((one, other) => {
      const [a, b] = [one[column], other[column]];
      if (a.sort === null || b.sort === null) {
        // rows without a number come last in both directions
        if (this.isNumber[column]) return (a.sort === null) - (b.sort === null);
        return sign * a.text.localeCompare(b.text, "en", { numeric: true });
      }
      return sign * (a.sort - b.sort);
    });
    this.draw();
    this.place.querySelectorAll("thead button")[column].focus();
  }

  get shown() {
    if (!this.data.byLayer) return this.rows;
    const matches = matcher(element("filter").value);
    // a pattern may match a layer, or its tensors
    return this.rows.filter(([layer]) => matches(layer.text) || ROLES.some((role) => matches(`${layer.text}.${role}`)));
  }

  draw() {
    const { columns, note } = this.data;
    this.place.replaceChildren();
    if (!this.rows.length) {
      if (note) this.place.append(make("p", note, { class: "empty" }));
      return;
    }
    if (note) this.place.append(make("p", note, { class: "note" }));
    const shown = this.shown;
    const body = make("tbody");
    for (const row of this.showsAll ? shown : shown.slice(0, this.limit)) {
      const line = make("tr");
      row.forEach((cell, column) => {
        const made = column ? make("td", cell.text) : make("th", cell.text, { scope: "row" });
        if (this.isNumber[column]) made.classList.add("number");
        if (cell.mark) made.classList.add("mark");
        line.append(made);
      });
      body.append(line);
    }
    const table = make("table");
    table.append(this.head(columns), body);
    const scrolled = make("div", undefined, { class: "scrolled" });
    scrolled.append(table);
    this.place.append(scrolled);
    this.addMore(shown.length);
  }

  head(columns) {
    const line = make("tr");
    columns.forEach((title, column) => {
      const made = make("th", undefined, { scope: "col" });
      if (this.isNumber[column]) made.classList.add("number");
      if (this.sortedBy === column) made.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      const button = make("button", title, { type: "button" });
      button.addEventListener("click", () => this.sort(column));
      made.append(title ? button : "");
      line.append(made);
    });
    const head = make("thead");
    head.append(line);
    return head;
  }

  addMore(count) {
    if (!count) this.place.append(make("p", "No layer matches the filter.", { class: "note" }));
    if (count <= this.limit) return;
    const text = this.showsAll ? `Show the first ${this.limit}` : `Show all ${counted(count)}`;
    const button = make("button", text, { type: "button", class: "more" });
    button.addEventListener("click", () => {
      this.showsAll = !this.showsAll;
      this.draw();
      this.place.querySelector(".more").focus();
    });
    this.place.append(button);
  }
}

function showTable(id, data, limit) {
  return new Table(element(id), data, limit);
}

// One table for each run, under its name where there are several.
function showTables(id, tablesOf) {
  for (const run of report.runs) {
    if (report.runs.length > 1) element(id).append(make("h3", run.name));
    for (const data of tablesOf(run)) {
      const place = make("div");
      element(id).append(place);
      new Table(place, data);
    }
  }
}
