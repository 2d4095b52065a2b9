// Commands are copied; tables whose headings are buttons are sorted by a column.
if (navigator.clipboard) {
  for (const button of document.querySelectorAll(".commands button")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(button.previousElementSibling.textContent).then(() => {
        button.textContent = "copied";
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      });
    });
  }
}
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const column = Number(button.dataset.column), falls = button.getAttribute("aria-sort") !== "descending";
      for (const other of table.querySelectorAll("th button")) other.removeAttribute("aria-sort");
      button.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.by, number = button.parentElement.classList.contains("n");
      const compare = number ? (a, b) => Number(value(b)) - Number(value(a)) : (a, b) => value(b).localeCompare(value(a));
      const sorted = [...body.rows].sort(compare);
      body.replaceChildren(...(falls ? sorted : sorted.reverse()));
    });
  }
}
