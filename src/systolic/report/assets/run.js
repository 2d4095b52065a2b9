"use strict";
const records = JSON.parse(document.getElementById("records").textContent);

function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle; else high = middle;
  }
  return high >= 0 && Math.abs(values[high] - x) < Math.abs(values[low] - x) ? high : low;
}

function words(key, index) {
  const columns = records.columns;
  const parts = ["step " + columns.step[index], columns[key][index]];
  if (key === "loss") {
    if (columns.smooth) parts.push("smoothed " + columns.smooth[index]);
    const before = records.evals.filter(([step]) => step <= records.x[index]).pop();
    if (before) parts.push("evaluation " + before[1] + " at " + before[0].toLocaleString("en"));
  }
  return parts.join("  ·  ");
}

// One cursor over all charts: the same step everywhere.
function show(x) {
  const index = x === null || !records.x.length ? -1 : nearest(records.x, x);
  for (const chart of document.querySelectorAll(".chart")) {
    chart.querySelector("output").textContent = index < 0 ? "" : words(chart.dataset.key, index);
    for (const plot of chart.querySelectorAll(".plot")) {
      const low = Number(plot.dataset.low), high = Number(plot.dataset.high);
      const place = index < 0 ? -1 : (records.x[index] - low) / (high - low);
      const cursor = plot.querySelector(".cursor");
      cursor.style.display = place < 0 || place > 1 ? "none" : "block";
      cursor.style.left = place * 100 + "%";
    }
  }
}

for (const plot of document.querySelectorAll(".plot")) {
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const low = Number(plot.dataset.low), high = Number(plot.dataset.high);
    show(low + (event.clientX - box.left) / box.width * (high - low));
  });
  plot.addEventListener("pointerleave", () => show(null));
}

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
