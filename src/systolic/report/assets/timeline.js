// The time line of a step on a canvas: lanes of spans, folded loops, zoom and drag.
const tree = JSON.parse(document.getElementById("tree").textContent);
const [NAME, OPCODE, START, LENGTH, LANE, COLOUR, PLACE, SOURCE, PRICED, FLOPS, BYTES, TURNS, INSIDE] = Array(13).keys();
const box = document.getElementById("timeline"), canvas = box.querySelector("canvas");
const pen = canvas.getContext("2d");
const whole = tree.seconds * 1e9, OPEN = 130, ROW = 26, LOOP = 19, AXIS = 22;
let LABELS = 132, view = [0, whole], only = -1, hits = [], grip = null, ink = {};

// What a folded loop shows: each lane's busy share of a turn, by colour. Counts lanes and depth, too.
const used = new Set();
let depth = 0;
function fold(spans, level) {
  const mix = new Map();
  const add = (lane, colour, time) => {
    const key = lane * 100 + colour;
    mix.set(key, (mix.get(key) || 0) + time);
  };
  for (const span of spans) {
    if (span.length > INSIDE) {
      depth = Math.max(depth, level + 1);
      span.mix = fold(span[INSIDE], level + 1);
      for (const [key, time] of span.mix) add(Math.floor(key / 100), key % 100, time * span[TURNS]);
    } else {
      used.add(span[LANE]);
      add(span[LANE], span[COLOUR], span[LENGTH]);
    }
  }
  return mix;
}
fold(tree.spans, 0);
const lanes = [...used].sort((a, b) => a - b);
const upper = depth * LOOP + (depth ? 6 : 0);
const rows = new Map();
let lower = upper, gap = 0, beside = 0;
for (const lane of lanes) {
  if (tree.lanes[lane].beside && !gap) { gap = 11; beside = lower + 5; lower += gap; }
  rows.set(lane, lower);
  lower += ROW;
}
canvas.style.height = lower + AXIS + "px";

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue("--" + name).trim();
  const count = document.querySelectorAll(".legend button").length - 1;
  ink = { text: of("ink"), soft: of("soft"), line: of("line"), paper: of("paper"), card: of("card"), colours: [] };
  for (let i = 0; i < count; i++) ink.colours.push(of("c" + i));
  ink.colours.push(of("cx"));
}

function scale() { return (canvas.clientWidth - LABELS) / (view[1] - view[0]); }
function place(time) { return LABELS + (time - view[0]) * scale(); }
function colour(number) { return only < 0 || only === number ? ink.colours[number] : ink.line; }

function words(ns) {
  for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) if (ns >= size) return Number((ns / size).toPrecision(4)) + " " + unit;
  return Number(ns.toPrecision(3)) + " ns";
}

function drawSpans(spans, origin, level, turn) {
  const k = scale(), right = canvas.clientWidth;
  for (const span of spans) {
    const begin = origin + span[START];
    const x = place(begin), w = span[LENGTH] * k;
    if (x > right || x + w < LABELS) continue;
    if (span.length > INSIDE) { drawLoop(span, begin, x, w, level, turn); continue; }
    const y = rows.get(span[LANE]) + 3, h = ROW - 6;
    const left = Math.max(x, LABELS), width = Math.max(Math.min(x + w, right) - left, 0.6);
    pen.fillStyle = colour(span[COLOUR]);
    pen.fillRect(left, y, width > 3 ? width - 0.5 : width, h);
    if (width > 60) label(tree.texts[span[PLACE]] + " " + tree.texts[span[NAME]], left, y, width, h);
    if (width > 1) hits.push([left, y, width, h, span, begin, turn]);
  }
}

function drawLoop(span, begin, x, w, level, turn) {
  const right = canvas.clientWidth, left = Math.max(x, LABELS), width = Math.min(x + w, right) - left;
  const length = span[LENGTH] / span[TURNS], wide = length * scale(), y = level * LOOP;
  pen.fillStyle = ink.line;
  pen.fillRect(left, y + 1, Math.max(width - 1, 0.6), LOOP - 3);
  hits.push([left, y, width, LOOP, span, begin, turn]);
  if (wide >= OPEN || span[TURNS] === 1) {
    const first = Math.max(0, Math.floor((view[0] - begin) / length));
    const last = Math.min(span[TURNS] - 1, Math.floor((view[1] - begin) / length));
    for (let i = first; i <= last; i++) {
      drawSpans(span[INSIDE], begin + i * length, level + 1, i);
      const at = place(begin + i * length);
      if (i && at > LABELS) { pen.fillStyle = ink.soft; pen.fillRect(at, y + 1, 1, LOOP - 3); }
    }
  } else {
    const filled = new Map();
    for (const [key, time] of span.mix) {
      const lane = Math.floor(key / 100), share = Math.min(time / length, 1), h = (ROW - 6) * share;
      const from = filled.get(lane) || 0;
      filled.set(lane, from + h);
      pen.fillStyle = colour(key % 100);
      pen.fillRect(left, rows.get(lane) + ROW - 3 - Math.min(from + h, ROW - 6), Math.max(width - 1, 0.6), h);
    }
    hits.push([left, upper, width, lower - upper, span, begin, turn]);
  }
  const name = tree.texts[span[NAME]] + (span[TURNS] > 1 ? " × " + span[TURNS] : "");
  if (width > 40) label(name, left, y, width, LOOP - 1, ink.text);
}

function label(text, x, y, w, h, fill) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, w - 3, h);
  pen.clip();
  pen.fillStyle = fill || "#fff";
  if (!fill) { pen.shadowColor = "rgba(0,0,0,.6)"; pen.shadowBlur = 2; }
  pen.fillText(text, x + 4, y + h / 2 + 0.5);
  pen.restore();
}

function drawAxis() {
  const width = view[1] - view[0], rough = width / Math.min(6, Math.max(2, Math.floor((canvas.clientWidth - LABELS) / 75))), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  pen.textAlign = "center";
  for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) {
    const x = place(t);
    pen.fillStyle = ink.line;
    pen.fillRect(x, upper, 1, lower - upper);
    pen.fillStyle = ink.soft;
    if (x > LABELS + 12 && x < canvas.clientWidth - 24) pen.fillText(t ? words(t) : "0", x, lower + AXIS / 2 + 2);
  }
  pen.textAlign = "left";
}

function draw() {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = lower + AXIS;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px " + getComputedStyle(document.body).fontFamily;
  pen.textBaseline = "middle";
  LABELS = Math.ceil(Math.max(...lanes.map((lane) => pen.measureText(tree.lanes[lane].name).width))) + 14;
  hits = [];
  for (const [lane, y] of rows) {
    pen.fillStyle = ink.paper;
    pen.fillRect(LABELS, y + 1, width - LABELS, ROW - 2);
  }
  drawAxis();
  drawSpans(tree.spans, 0, 0, -1);
  pen.fillStyle = ink.card;
  pen.fillRect(0, 0, LABELS - 1, height);
  pen.fillStyle = ink.soft;
  if (depth) pen.fillText("loops", 0, LOOP / 2);
  if (gap) for (let x = 0; x < width; x += 6) pen.fillRect(x, beside, 2, 1);
  for (const [lane, y] of rows) pen.fillText(tree.lanes[lane].name, 0, y + ROW / 2);
}

let due = false;
function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; draw(); });
}

function look(a, b) {
  const least = 50, width = Math.min(Math.max(b - a, least), whole), from = Math.min(Math.max(a, 0), whole - width);
  view = [from, from + width];
  redraw();
}

function zoom(factor, at) {
  look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
}

function timeAt(event) {
  return view[0] + (event.clientX - canvas.getBoundingClientRect().left - LABELS) / scale();
}

function under(event) {
  const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
  for (let i = hits.length - 1; i >= 0; i--) {
    const [left, up, w, h] = hits[i];
    if (x >= left && x <= left + w && y >= up && y <= up + h) return hits[i];
  }
  return null;
}

function tell(event) {
  const hit = under(event);
  if (!hit) { tip.hide(); return; }
  const [, , , , span, begin, turn] = hit, loop = span.length > INSIDE;
  const lines = [tree.texts[span[OPCODE]] + " " + tree.texts[span[NAME]] + (turn >= 0 ? ", turn " + (turn + 1) : "")];
  if (loop) lines.push(span[TURNS] + " turns of " + words(span[LENGTH] / span[TURNS]) + ", " + words(span[LENGTH]) + " in all");
  else {
    lines.push(words(span[LENGTH]) + " from " + words(begin) + ", " + tree.lanes[span[LANE]].name + (span[PRICED] && tree.texts[span[PRICED]] ? ", priced by " + tree.texts[span[PRICED]] : ""));
    const work = [];
    if (span[FLOPS]) work.push((span[FLOPS] / span[LENGTH] / 1e3).toPrecision(3) + " TFLOP/s");
    if (span[BYTES]) work.push((span[BYTES] / span[LENGTH]).toPrecision(3) + " GB/s, " + (span[BYTES] < 1e9 ? Number((span[BYTES] / 1e6).toPrecision(3)) + " MB" : (span[BYTES] / 1e9).toPrecision(3) + " GB"));
    if (work.length) lines.push(work.join(", "));
  }
  for (const part of [PLACE, SOURCE]) if (tree.texts[span[part]]) lines.push(tree.texts[span[part]]);
  tip.show(lines, event);
}

canvas.addEventListener("pointerdown", (event) => {
  grip = { x: event.clientX, view: [...view], moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!grip) { tell(event); return; }
  const shift = (event.clientX - grip.x) / scale();
  if (Math.abs(event.clientX - grip.x) > 4) grip.moved = true;
  if (grip.moved) { tip.hide(); look(grip.view[0] - shift, grip.view[1] - shift); }
});
canvas.addEventListener("pointerup", (event) => {
  const moved = grip && grip.moved;
  grip = null;
  if (moved) return;
  const hit = under(event);
  if (!hit) return;
  const [, , , , span, begin] = hit;
  const length = span.length > INSIDE ? span[LENGTH] / span[TURNS] : span[LENGTH];
  const turn = span.length > INSIDE ? Math.min(Math.max(Math.floor((timeAt(event) - begin) / length), 0), span[TURNS] - 1) : 0;
  const margin = span.length > INSIDE ? 0.04 : 1.5;
  look(begin + turn * length - length * margin, begin + (turn + 1) * length + length * margin);
});
canvas.addEventListener("pointerleave", tip.hide);
// The page scrolls until the time line was touched: a reader who passes by is not caught.
canvas.addEventListener("wheel", (event) => {
  if (document.activeElement !== canvas && !event.ctrlKey) return;
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { const by = event.deltaX / scale(); look(view[0] + by, view[1] + by); }
  else zoom(Math.exp(event.deltaY * 0.002), timeAt(event));
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const middle = (view[0] + view[1]) / 2, by = (view[1] - view[0]) / 5;
  const moves = { ArrowLeft: () => look(view[0] - by, view[1] - by), ArrowRight: () => look(view[0] + by, view[1] + by), "+": () => zoom(0.5, middle), "-": () => zoom(2, middle), Escape: () => look(0, whole) };
  if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
});
for (const button of box.querySelectorAll(".tools button")) {
  button.addEventListener("click", () => {
    const middle = (view[0] + view[1]) / 2;
    ({ in: () => zoom(0.5, middle), out: () => zoom(2, middle), all: () => look(0, whole) })[button.dataset.do]();
  });
}
for (const button of box.querySelectorAll(".legend button")) {
  const show = (number) => () => { only = number; redraw(); };
  button.addEventListener("pointerenter", show(Number(button.dataset.colour)));
  button.addEventListener("pointerleave", show(-1));
  button.addEventListener("focus", show(Number(button.dataset.colour)));
  button.addEventListener("blur", show(-1));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
new ResizeObserver(redraw).observe(canvas);
readColours();
draw();
