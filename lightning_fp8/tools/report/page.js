"use strict";
const all = (selector) => document.querySelectorAll(selector);

// charts take the width of what is unfolded; on a touch screen a drag scrolls the page
for (const part of all("details")) part.addEventListener("toggle", () => dispatchEvent(new Event("resize")));
if (matchMedia("(pointer: coarse)").matches) for (const chart of all(".js-plotly-plot")) Plotly.relayout(chart, { dragmode: false });

for (const button of all(".copy")) button.addEventListener("click", () => {
  getSelection().selectAllChildren(button.previousElementSibling);
  button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
});

// a click on a title sorts, another one in reverse; rows without a number come last
for (const title of all("thead th")) title.addEventListener("click", () => {
  const body = title.closest("table").tBodies[0];
  const sign = (title.dataset.sign = title.dataset.sign === "1" ? "-1" : "1");
  const cell = (row) => row.cells[title.cellIndex];
  const isNumber = [...body.rows].some((row) => "sort" in cell(row).dataset);
  const number = (row) => parseFloat(cell(row).dataset.sort ?? sign * Infinity);
  const order = (a, b) => (isNumber ? number(a) - number(b) || 0 : cell(a).textContent.localeCompare(cell(b).textContent, "en", { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => sign * order(a, b)));
});
