// Canvases: effective attention as a matrix, and how far back each head reads.

function paint(canvas, width, height, colour) {
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) image.data.set(colour(i), 4 * i);
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
}
const signed = () => {
  const [plus, minus] = ["--plus", "--minus"].map((name) => rgb(getComputedStyle(document.documentElement).getPropertyValue(name)));
  return (value) => [...(value < 0 ? minus : plus), Math.round(255 * Math.min(1, Math.abs(value)))];
};

// The matrix of the whole text, and of the tokens around one: there it is exact, but for what is not among the strongest.
function whole(canvas, l, head) {
  const { side: n, picture } = D.layers[l].attention, roots = unpack(picture), colour = signed();
  const which = head === ALL ? range(heads(l)) : [head];
  paint(canvas, n, n, (i) => colour(which.reduce((sum, h) => sum + roots[h * n * n + i], 0) / which.length));
}
function around(canvas, l, head) {
  const n = Math.min(AROUND, T), start = corner(), colour = signed(), values = new Float64Array(n * n);
  for (let row = 0; row < n; row++)
    for (const [s, share] of reads(start + row, l, head).list) if (s >= start) values[row * n + s - start] = share;
  const most = values.reduce((a, x) => Math.max(a, Math.abs(x)), 1e-9);
  paint(canvas, n, n, (i) => colour(Math.sign(values[i]) * Math.sqrt(Math.abs(values[i]) / most)));
}
const AROUND = 64;
const corner = () => Math.max(0, Math.min(T - AROUND, (view.token ?? 0) - (AROUND * 3) / 4));

// How far back a head reads (upwards, by powers of 2), through the text.
function distances(canvas, l, h) {
  const p = unpack(D.layers[l].attention.profile), bins = Math.ceil(Math.log2(T)) + 1;
  const width = p.length / bins / heads(l), ink = canvas.getContext("2d");
  ink.fillStyle = getComputedStyle(canvas).color;
  ink.fillRect(0, 0, 1, 1);
  const [r, g, b] = ink.getImageData(0, 0, 1, 1).data;
  paint(canvas, width, bins, (i) => [r, g, b, 255 * Math.sqrt(p[(h * bins + bins - 1 - Math.floor(i / width)) * width + (i % width)])]);
}
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16));

function matrix() {
  const layer = D.layers[view.layer], a = layer.attention;
  $("where").textContent = `Effective attention, ${name()} (${layer.mixer})`;
  $("none").textContent = layer.none || "";
  $("matrix").hidden = $("zoom").hidden = $("note").hidden = !a;
  if (!a) return;
  (view.near ? around : whole)($("picture"), view.layer, view.head);
  for (const button of $("zoom").children) button.setAttribute("aria-pressed", String((button.value === "near") === view.near));
  const exact = view.near || a.block === 1;
  $("note").textContent = `Rows: tokens that read. Columns: tokens that are read. The colour strength is the square root of ${exact ? "the weight" : `the mean weight of ${a.block} × ${a.block} tokens`}, as a fraction of the row.`;
  cross();
}

function spread() {
  const { side, block } = D.layers[view.layer].attention ?? { side: T, block: 1 }; // the last block may be a part
  return view.near ? { start: corner(), count: Math.min(AROUND, T) } : { start: 0, count: side * block };
}

function cross() {
  const canvas = $("cross"), n = 640, { start, count } = spread();
  canvas.width = canvas.height = n;
  if (view.token === null) return;
  const pen = canvas.getContext("2d"), at = ((view.token - start + 0.5) / count) * n;
  pen.strokeStyle = getComputedStyle(document.body).color;
  pen.globalAlpha = 0.45;
  pen.lineWidth = 1.5;
  pen.strokeRect(-2, at - n / count / 2, at + n / count / 2 + 2, n / count);
}

function pointed(event) {
  const box = $("matrix").getBoundingClientRect(), { start, count } = spread();
  const at = (x, size) => Math.max(0, Math.min(T - 1, start + Math.floor((x / size) * count)));
  return [at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width)];
}

function say(event) {
  const [t, s] = pointed(event), found = reads(t, view.layer, view.head).list.find(([place]) => place === s);
  $("note").replaceChildren(make("code", {}, word(t)), ` (${t}) reads `, make("code", {}, word(s)), ` (${s}): `,
    s > t ? "0, as it comes later" : found ? percent(found[1]) : "not among the kept weights");
}
