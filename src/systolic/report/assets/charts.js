// One tooltip for all charts: the first line is its title.
const tip = (() => {
  const box = document.createElement("div");
  box.className = "tip";
  box.hidden = true;
  document.body.append(box);
  function show(lines, event) {
    box.replaceChildren(...lines.map((text, i) => {
      const line = document.createElement(i ? "div" : "b");
      line.textContent = text;
      return line;
    }));
    box.hidden = false;
    const right = innerWidth - box.offsetWidth - 8, below = event.clientY + 18;
    const top = below + box.offsetHeight < innerHeight ? below : event.clientY - box.offsetHeight - 12;
    box.style.left = Math.max(8, Math.min(event.clientX + 14, right)) + "px";
    box.style.top = Math.max(8, top) + "px";
  }
  return { show, hide: () => { box.hidden = true; } };
})();

// Marks with a title: it is shown at once, and on touch, in place of the browser's own.
{
  const marks = ".plot b, .bar i, .lane i, .map div, .columns i, .mesh rect, .parallel path";
  for (const mark of document.querySelectorAll(marks)) {
    const inner = mark.querySelector("title"), text = inner ? inner.textContent : mark.title;
    if (!text) continue;
    const lines = text.split("\n"), at = text.indexOf(": ");
    mark.tip = lines.length > 1 || at < 0 ? lines : [text.slice(0, at), text.slice(at + 2)];
    if (inner) inner.remove(); else mark.removeAttribute("title");
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", text);
  }
  const follow = (event) => {
    for (let mark = event.target; mark; mark = mark.parentElement) {
      if (mark.tip) { tip.show(mark.tip, event); return; }
      if (mark.localName === "canvas") return;
    }
    tip.hide();
  };
  addEventListener("pointermove", follow);
  addEventListener("pointerdown", follow);
  addEventListener("pointercancel", tip.hide);
  document.documentElement.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") tip.hide();
  });
}

// The pointer reads values off all charts of the page at the same step.
for (const element of document.querySelectorAll("#records")) {
  const records = JSON.parse(element.textContent);

  const nearest = (values, x) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle; else high = middle;
    }
    return high >= 0 && Math.abs(values[high] - x) < Math.abs(values[low] - x) ? high : low;
  };

  const words = (key, index) => {
    const columns = records.columns;
    const parts = ["step " + columns.step[index], columns[key][index]];
    if (key === "loss") {
      if (columns.smooth) parts.push("smoothed " + columns.smooth[index]);
      const before = records.evals.filter(([step]) => step <= records.x[index]).pop();
      if (before) parts.push("evaluation " + before[1] + " at " + before[0].toLocaleString("en"));
    }
    return parts.join("  ·  ");
  };

  const show = (x) => {
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
  };

  for (const plot of document.querySelectorAll(".plot[data-low]")) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const low = Number(plot.dataset.low), high = Number(plot.dataset.high);
      show(low + (event.clientX - box.left) / box.width * (high - low));
    });
    plot.addEventListener("pointerleave", () => show(null));
  }
}
