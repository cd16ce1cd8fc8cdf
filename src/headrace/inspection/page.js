"use strict";
const $ = (id) => document.getElementById(id);
const D = JSON.parse($("data").textContent);
const T = D.ids.length, ALL = -1;
const view = { token: null, held: false, layer: 0, head: ALL, by: "loss", match: -1, matches: [], near: T > 256 };

// --- numbers, unpacked when first looked at

const kept = new Map();
function once(key, make) {
  if (!kept.has(key)) kept.set(key, make());
  return kept.get(key);
}

function unpack(packed) {
  return once(packed, () => {
    const text = atob(packed.data), raw = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
    const whole = packed.bits === 16 ? new Uint16Array(raw.buffer) : raw;
    if (packed.raw) return whole;
    const levels = 2 ** packed.bits - 2, step = (packed.high - packed.low) / levels;
    const value = (n) => (n > levels ? NaN : packed.low + n * step);
    return Float64Array.from(whole, packed.log ? (n) => Math.exp(value(n)) : value);
  });
}

const heads = (l) => D.layers[l].heads;
const range = (n) => Array.from({ length: n }, (_, i) => i);

function shares(l, gate) {
  return once(`${l} ${gate}`, () => {
    const g = unpack(D.layers[l].gates[gate]), H = heads(l), out = new Float64Array(g.length);
    for (let t = 0; t < T; t++) {
      let sum = 0;
      for (let h = 0; h < H; h++) sum += g[t * H + h];
      for (let h = 0; h < H; h++) out[t * H + h] = g[t * H + h] / sum;
    }
    return out;
  });
}

function entropy(l, gate) {
  return once(`${l} ${gate} entropy`, () => {
    const p = shares(l, gate), H = heads(l);
    return range(T).map((t) => {
      let sum = 0;
      for (let h = 0; h < H; h++) if (p[t * H + h] > 0) sum -= p[t * H + h] * Math.log(p[t * H + h]);
      return sum / Math.log(Math.max(H, 2));
    });
  });
}

// By token: of one head, or a mean over all of them. at(t, h) says where a number lies.
function across(values, at, l, head, log) {
  if (head !== ALL) return range(T).map((t) => values[at(t, head)]);
  const H = heads(l);
  return range(T).map((t) => {
    let sum = 0;
    for (let h = 0; h < H; h++) sum += log ? Math.log(values[at(t, h)]) : values[at(t, h)];
    return log ? Math.exp(sum / H) : sum / H;
  });
}
const byToken = (l) => (t, h) => t * heads(l) + h;
const byHead = (t, h) => h * T + t;

// --- what tokens can be coloured by

const digits = (x, n = 3) => (!isFinite(x) ? "–" : Math.abs(x) >= 1e5 ? x.toExponential(1) : Number(x.toPrecision(n)).toLocaleString("en"));
const percent = (x) => (x < 0 ? "−" : "") + (100 * Math.abs(x)).toFixed(Math.abs(x) < 0.0995 ? 1 : 0) + " %";
const horizons = (x) => (x >= 9.9e8 ? "never fades" : digits(x) + " tokens");
const gated = (gate) => (l) => D.layers[l].gates[gate] !== undefined;
const BY = {
  loss: { label: "next-token loss", hue: "var(--warm)", show: (x) => digits(x) + " nats", has: () => true, of: () => unpack(D.loss) },
  write: { label: "heads it writes to", winner: "write", show: percent, has: gated("write"), of: (l, h) => across(shares(l, "write"), byToken(l), l, h) },
  read: { label: "heads it reads from", winner: "read", show: percent, has: gated("read"), of: (l, h) => across(shares(l, "read"), byToken(l), l, h) },
  "write-entropy": { label: "entropy of the write gate", show: digits, has: gated("write"), of: (l) => entropy(l, "write") },
  "read-entropy": { label: "entropy of the read gate", show: digits, has: gated("read"), of: (l) => entropy(l, "read") },
  horizon: { label: "decay horizon", log: true, show: horizons, has: (l) => !!D.layers[l].horizon, of: (l, h) => across(unpack(D.layers[l].horizon), byToken(l), l, h, true) },
  beta: { label: "write strength β", show: digits, has: (l) => !!D.layers[l].beta, of: (l, h) => across(unpack(D.layers[l].beta), byToken(l), l, h) },
  reach: { label: "mean distance read", log: true, show: (x) => digits(x) + " tokens", has: (l) => !!D.layers[l].attention, of: (l, h) => across(unpack(D.layers[l].attention.reach), byHead, l, h) },
};
const hue = (h, l) => `oklch(var(--head-light) var(--head-chroma) ${Math.round((360 * h) / heads(l) + 25) % 360})`;

// --- effective attention

// What token t reads: [[token, share of the row], …], the largest first, and the part of the row that they cover.
function reads(t, l, head) {
  const a = D.layers[l].attention;
  if (!a) return { list: [], covered: 0 };
  const places = unpack(a.places), share = unpack(a.shares), covered = unpack(a.covered), K = a.strongest;
  const sum = new Map();
  let all = 0;
  for (const h of head === ALL ? range(heads(l)) : [head]) {
    const weight = head !== ALL ? 1 : gated("read")(l) ? shares(l, "read")[t * heads(l) + h] : 1 / heads(l);
    all += weight * covered[h * T + t];
    for (let k = 0; k < K; k++) {
      const i = (h * T + t) * K + k, s = places[i];
      if (s <= t && Math.abs(share[i]) > 5e-5) sum.set(s, (sum.get(s) || 0) + weight * share[i]);
    }
  }
  return { list: [...sum].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])), covered: all };
}

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

// --- elements

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
const word = (t) => visible(D.labels[t] || D.vocabulary[D.ids[t]]);
const meter = (x, colour) => make("span", { className: "meter" }, make("i", { style: `width:${100 * Math.min(1, Math.abs(x))}%`, "--hue": colour }));

const spans = D.labels.map((label, t) => {
  const span = make("span", { className: label ? "t" : "t later" });
  span.dataset.t = t;
  for (const part of (label || "·").split(/(\n)/)) {
    if (part === "\n") span.append(make("span", { className: "mark" }, "↵"), "\n");
    else if (part) span.append(part);
  }
  return span;
});

// --- what is drawn

function colour() {
  const by = BY[view.by], l = view.layer, values = by.of(l, view.head);
  const scale = by.log ? (x) => Math.log(Math.max(x, 1e-3)) : (x) => x;
  const sorted = Array.from(values).filter(isFinite).map(scale).sort((a, b) => a - b);
  const low = sorted[Math.floor(0.02 * (sorted.length - 1))], high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
  const winners = by.winner && view.head === ALL;
  const p = winners && shares(l, by.winner), H = heads(l);
  spans.forEach((span, t) => {
    let strength = isFinite(values[t]) ? (scale(values[t]) - low) / (high - low || 1) : 0, of = by.hue || "var(--cool)";
    if (winners) {
      const first = range(H).reduce((a, h) => (p[t * H + h] > p[t * H + a] ? h : a), 0);
      strength = 0.12 + ((p[t * H + first] - 1 / H) / (1 - 1 / H || 1)) * 1.1;
      of = hue(first, l);
    } else if (by.winner) of = hue(view.head, l);
    span.style.setProperty("--a", (0.8 * Math.max(0, Math.min(1, strength))).toFixed(3));
    span.style.setProperty("--hue", of);
  });
  const unlog = by.log ? Math.exp : (x) => x;
  $("legend").replaceChildren(...(winners
    ? [...range(H).map((h) => make("span", {}, make("i", { className: "chip", "--hue": hue(h, l) }), `head ${h}`)), "stronger: a larger share"]
    : [by.show(unlog(low)), make("i", { className: "ramp", "--hue": by.winner ? hue(view.head, l) : by.hue || "var(--cool)" }), by.show(unlog(high))]));
}

let barred = [];
function bars() {
  for (const span of barred) { span.style.removeProperty("--bar"); span.classList.remove("now"); }
  barred = [];
  if (view.token === null) return;
  const { list } = reads(view.token, view.layer, view.head), most = list.length ? Math.abs(list[0][1]) : 1;
  for (const [s, share] of list) {
    spans[s].style.setProperty("--bar", (1 + 6 * Math.sqrt(Math.abs(share) / most)).toFixed(1));
    spans[s].style.setProperty("--sign", share < 0 ? "var(--minus)" : "var(--plus)");
    barred.push(spans[s]);
  }
  spans[view.token].classList.add("now");
  barred.push(spans[view.token]);
}

function token() {
  const t = view.token, box = $("token");
  if (t === null) {
    box.replaceChildren(make("h2", {}, "Token"), make("p", {}, "Point at a token, or go through the text with ← and →. A click holds it."));
    return;
  }
  const l = view.layer, layer = D.layers[l], loss = unpack(D.loss)[t], chances = unpack(D.chances);
  const guesses = D.guesses[t].map((id, i) => [make("code", {}, visible(D.vocabulary[id])), " " + percent(chances[t * D.guesses[t].length + i]) + "  "]);
  const H = heads(l), columns = [];
  for (const gate of ["write", "read"])
    if (gated(gate)(l)) columns.push([gate + "s", (h) => { const x = shares(l, gate)[t * H + h]; return [meter(x, hue(h, l)), percent(x)]; }]);
  if (layer.horizon) columns.push(["horizon", (h) => [digits(unpack(layer.horizon)[t * H + h])], "tokens after which memory has faded to 1/e"]);
  if (layer.beta) columns.push(["β", (h) => [digits(unpack(layer.beta)[t * H + h])]]);
  if (layer.attention) columns.push(["distance", (h) => [digits(unpack(layer.attention.reach)[h * T + t])], "mean distance read, in tokens"]);
  const rows = range(H).map((h) => make("tr", { className: h === view.head ? "chosen" : "", onclick: () => choose({ head: view.head === h ? ALL : h }) },
    make("td", {}, make("i", { className: "chip", "--hue": hue(h, l) }), `head ${h}`), ...columns.map(([, cell]) => make("td", {}, ...cell(h)))));
  const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, layer.name), ...columns.map(([name, , title]) => make("th", { title: title || "" }, name)))), make("tbody", {}, ...rows));
  const gates = ["write", "read"].filter((gate) => gated(gate)(l)).map((gate) => `${gate} ${digits(entropy(l, gate)[t])}`);
  box.replaceChildren(
    make("div", { className: "what" }, make("code", {}, word(t))),
    make("p", {}, `token ${t} of ${T} · id ${D.ids[t]} · `, ...(isFinite(loss) ? ["loss ", make("b", {}, digits(loss)), ` nats, p = ${digits(Math.exp(-loss), 2)}`] : ["the first: nothing before it"])),
    ...(isFinite(loss) ? [make("p", {}, "likeliest: ", ...guesses.flat())] : []),
    make("div", { className: "rows" }, table),
    ...(gates.length ? [make("p", {}, "entropy of the gates: ", make("b", {}, gates.join(" · ")))] : []),

    ...(layer.attention ? reading(t) : []));
}

function reading(t) {
  const { list, covered } = reads(t, view.layer, view.head), most = list.length ? Math.abs(list[0][1]) : 1;
  const rows = list.slice(0, 8).flatMap(([s, share]) => [
    make("code", {}, word(s)), meter(share / most, share < 0 ? "var(--minus)" : "var(--plus)"), make("span", {}, percent(share)), make("span", {}, s === t ? "itself" : `−${t - s}`)]);
  return [make("p", {}, `reads most, in ${name()}:`), make("div", { className: "reads" }, ...rows),
    make("p", { className: "key" }, `The strongest are kept, ${list.length} tokens here; they cover ${percent(Math.min(1, covered))} of the row.`)];
}
const name = () => `${D.layers[view.layer].name}, ${view.head === ALL ? "all heads" : `head ${view.head}`}`;

function matrix() {
  const layer = D.layers[view.layer], a = layer.attention;
  $("where").textContent = `Effective attention, ${name()} (${layer.mixer})`;
  $("none").textContent = layer.none || "";
  $("matrix").hidden = $("zoom").hidden = $("honest").hidden = !a;
  if (!a) return;
  (view.near ? around : whole)($("picture"), view.layer, view.head);
  for (const button of $("zoom").children) button.setAttribute("aria-pressed", String((button.value === "near") === view.near));
  const exact = view.near || a.block === 1;
  $("honest").textContent = `Downwards the tokens that read, rightwards what they read. Each point is ${exact ? "the" : `the mean of ${a.block} × ${a.block} tokens'`} share of its row, by its root.`;
  cross();
}

const spread = () => (view.near ? { start: corner(), count: Math.min(AROUND, T) } : { start: 0, count: T });

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
  $("honest").replaceChildren(make("code", {}, word(t)), ` (${t}) reads `, make("code", {}, word(s)), ` (${s}): `,
    s > t ? "it is later" : found ? percent(found[1]) : "not among the strongest");
}

function grid() {
  const most = Math.max(...D.layers.map((layer) => layer.heads));
  const drawn = [], cells = [make("span"), ...range(most).map((h) => make("span", { style: "text-align:center" }, `head ${h}`))];
  D.layers.forEach((layer, l) => {
    cells.push(make("span", { className: "name" }, layer.name, make("small", {}, layer.mixer)));
    for (let h = 0; h < most; h++) {
      if (h >= layer.heads) { cells.push(make("span")); continue; }
      const button = make("button", { title: `${layer.name}, head ${h}`, "aria-label": `${layer.name}, head ${h}`, onclick: () => choose({ layer: l, head: h }) });
      button.dataset.at = `${l} ${h}`;
      button.append(layer.attention ? make("canvas", { style: `color:${hue(h, l)}` }) : "none");
      cells.push(button);
      if (layer.attention) drawn.push(() => distances(button.firstChild, l, h));
    }
  });
  $("grid").style.gridTemplateColumns = `max-content repeat(${most}, minmax(3rem, 9.5rem))`;
  $("grid").replaceChildren(...cells);
  for (const draw of drawn) draw();
}

function choices() {
  const button = (text, on, change) => make("button", { type: "button", "aria-pressed": String(on), onclick: () => choose(change) }, text);
  $("layers").replaceChildren(make("b", {}, "layer"), ...D.layers.map((layer, l) => button(layer.name.replace("layer ", ""), l === view.layer, { layer: l })));
  $("heads").replaceChildren(make("b", {}, "head"), ...[ALL, ...range(heads(view.layer))].map((h) => button(h === ALL ? "all" : h, h === view.head, { head: h })));
  $("by").replaceChildren(...Object.entries(BY).filter(([, by]) => by.has(view.layer)).map(([id, by]) => make("option", { value: id, selected: id === view.by }, by.label)));
  for (const cell of $("grid").querySelectorAll("button")) {
    const [l, h] = cell.dataset.at.split(" ").map(Number);
    cell.setAttribute("aria-pressed", String(l === view.layer && (h === view.head || view.head === ALL)));
  }
}

// --- what is done

function choose(change) {
  Object.assign(view, change);
  view.layer = Math.max(0, Math.min(D.layers.length - 1, view.layer));
  if (view.head >= heads(view.layer) || view.head < ALL) view.head = ALL;
  if (!BY[view.by] || !BY[view.by].has(view.layer)) view.by = "loss";
  choices();
  colour();
  if (!view.near) matrix();
  go(view.token, view.held);
}

function go(t, held = false, scroll = false) {
  view.token = t === null ? null : Math.max(0, Math.min(T - 1, t));
  view.held = held;
  bars();
  token();
  if (view.near) matrix(); else cross();
  if (scroll && view.token !== null) spans[view.token].scrollIntoView({ block: "nearest" });
  const { layer, head, by } = view;
  if (held) history.replaceState(null, "", "#" + new URLSearchParams({ layer, head, by, token: view.token }));
}

function search() {
  const wanted = $("find").value.toLowerCase(), text = D.labels.join("").toLowerCase(), starts = [];
  let end = 0;
  for (const label of D.labels) { starts.push(end); end += label.length; }
  view.matches = [];
  for (const span of spans) span.classList.remove("hit");
  for (let at = wanted ? text.indexOf(wanted) : -1; at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    const hits = range(T).filter((t) => D.labels[t] && starts[t] < at + wanted.length && starts[t] + D.labels[t].length > at);
    for (const t of hits) spans[t].classList.add("hit");
    if (hits.length) view.matches.push(hits[hits.length - 1]);
  }
  view.match = -1;
  $("found").textContent = wanted ? `${view.matches.length} found` : "";
}

function next(step) {
  if (!view.matches.length) return;
  view.match = (view.match + step + view.matches.length + (view.match < 0 && step < 0 ? 1 : 0)) % view.matches.length;
  $("found").textContent = `${view.match + 1} of ${view.matches.length}`;
  go(view.matches[view.match], true, true);
}

const KEYS = {
  ArrowRight: () => go((view.token ?? -1) + 1, true, true),
  ArrowLeft: () => go((view.token ?? 1) - 1, true, true),
  ArrowUp: () => choose({ layer: view.layer - 1 }),
  ArrowDown: () => choose({ layer: view.layer + 1 }),
  "]": () => choose({ head: view.head + 1 }),
  "[": () => choose({ head: view.head === ALL ? heads(view.layer) - 1 : view.head - 1 }),
  c: () => { const all = Object.keys(BY).filter((id) => BY[id].has(view.layer)); choose({ by: all[(all.indexOf(view.by) + 1) % all.length] }); },
  n: () => next(1),
  N: () => next(-1),
  "/": () => $("find").focus(),
  Escape: () => { document.activeElement.blur(); go(null); },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === $("find")) {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
  }
  if (event.target.tagName === "SELECT" || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
const under = (event) => { const span = event.target.closest(".t"); return span ? Number(span.dataset.t) : null; };
$("text").addEventListener("mouseover", (event) => { const t = under(event); if (t !== null && !view.held) go(t); });
$("text").addEventListener("mouseleave", () => { if (!view.held) go(null); });
$("text").addEventListener("click", (event) => { const t = under(event); go(t, t !== null && !(view.held && t === view.token)); });
$("matrix").addEventListener("mousemove", say);
$("matrix").addEventListener("mouseleave", matrix);
$("matrix").addEventListener("click", (event) => go(pointed(event)[0], true, true));
$("zoom").addEventListener("click", (event) => { if (event.target.value) { view.near = event.target.value === "near"; matrix(); } });
$("by").addEventListener("change", () => choose({ by: $("by").value }));
$("find").addEventListener("input", search);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { grid(); choose({}); });
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

// --- the beginning

const mixers = [...new Set(D.layers.map((layer) => layer.mixer))].join(" + ");
const counts = [...new Set(D.layers.filter((layer) => layer.attention || Object.keys(layer.gates).length).map((layer) => layer.heads))];
$("title").textContent = `${mixers}, ${D.layers.length} layer${D.layers.length > 1 ? "s" : ""}${counts.length === 1 ? ` of ${counts[0]} heads` : ""}`;
$("summary").textContent = `${(D.parameters / 1e6).toPrecision(3)} M parameters · ${T.toLocaleString("en")} tokens${D.cut ? ` (${D.cut.toLocaleString("en")} more were cut off)` : ""} · mean loss ${D.mean.toFixed(3)} nats, perplexity ${digits(Math.exp(D.mean))}`;
$("text").append(...spans);
grid();
const asked = new URLSearchParams(location.hash.slice(1)), number = (key, otherwise) => (asked.has(key) ? Number(asked.get(key)) : otherwise);
choose({ layer: number("layer", 0), head: number("head", ALL), by: asked.get("by") ?? (gated("write")(0) ? "write" : "loss") });
if (asked.has("token")) go(number("token", 0), true, true);
document.documentElement.dataset.tokens = spans.length;
document.documentElement.dataset.ready = Math.round(performance.now());
