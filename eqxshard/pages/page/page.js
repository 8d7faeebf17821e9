"use strict";

// What a cell is sorted by: its number, if it has one.
function key(row, column) {
  const cell = row.cells[column];
  const number = cell.dataset.value;
  return number === undefined ? cell.textContent : Number(number);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  // What has no number comes before what has one.
  if (typeof a !== typeof b) return typeof a === "number" ? 1 : -1;
  return a.localeCompare(b, "en", { numeric: true });
}

function makeSortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // Numbers begin with the largest, words with the first.
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of heads) each.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows];
      rows.sort((a, b) => sign * compare(key(a, column), key(b, column)));
      body.append(...rows);
    });
  });
}

function makeSearchable(search, table) {
  const field = search.querySelector("input");
  const count = search.querySelector("output");
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      found += row.hidden ? 0 : 1;
    });
    const whole = rows.length.toLocaleString("en");
    const some = `${found.toLocaleString("en")} of ${whole}`;
    count.value = `${words.length ? some : whole} ${count.dataset.what}`;
  });
  search.hidden = rows.length <= 5;
}

for (const table of document.querySelectorAll("table.sortable")) {
  makeSortable(table);
  makeSearchable(table.parentElement.previousElementSibling, table);
}
