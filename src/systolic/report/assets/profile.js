const table = document.getElementById("ops"), body = table.tBodies[0];
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
