// The text, the panel of the selected token, and the controls.

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

function colour() {
  const by = BY[view.by], l = view.layer, values = by.of(l, view.head);
  const scale = by.log ? (x) => Math.log(Math.max(x, 1e-3)) : (x) => x;
  const sorted = Array.from(values).filter(isFinite).sort((a, b) => a - b);
  const low = sorted[Math.floor(0.02 * (sorted.length - 1))], high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
  const winners = by.winner && view.head === ALL;
  const p = winners && shares(l, by.winner), H = heads(l);
  spans.forEach((span, t) => {
    let strength = isFinite(values[t]) ? (scale(values[t]) - scale(low)) / (scale(high) - scale(low) || 1) : 0, of = by.hue || "var(--cool)";
    if (winners) {
      const first = range(H).reduce((a, h) => (p[t * H + h] > p[t * H + a] ? h : a), 0);
      strength = 0.12 + ((p[t * H + first] - 1 / H) / (1 - 1 / H || 1)) * 1.1;
      of = hue(first, l);
    } else if (by.winner) of = hue(view.head, l);
    span.style.setProperty("--a", (0.8 * Math.max(0, Math.min(1, strength))).toFixed(3));
    span.style.setProperty("--hue", of);
  });
  $("legend").replaceChildren(...(winners
    ? [...range(H).map((h) => make("span", {}, make("i", { className: "chip", "--hue": hue(h, l) }), `head ${h}`)), "stronger colour: larger share"]
    : [by.show(low), make("i", { className: "ramp", "--hue": by.winner ? hue(view.head, l) : by.hue || "var(--cool)" }), by.show(high)]));
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
    box.replaceChildren(make("h2", {}, "Token"), make("p", {}, "Point at a token, or use ← and →. Click a token to keep it selected."));
    return;
  }
  const l = view.layer, layer = D.layers[l], loss = unpack(D.loss)[t], chances = unpack(D.chances);
  const guesses = D.guesses[t].map((id, i) => [make("code", {}, visible(D.vocabulary[id])), " " + percent(chances[t * D.guesses[t].length + i]) + "  "]);
  const H = heads(l), columns = [];
  for (const gate of ["write", "read"])
    if (gated(gate)(l)) columns.push([gate + " share", (h) => { const x = shares(l, gate)[t * H + h]; return [meter(x, hue(h, l)), percent(x)]; }]);
  if (layer.horizon) columns.push(["horizon", (h) => [horizons(unpack(layer.horizon)[t * H + h])], "tokens after which the state has decayed to 1/e"]);
  if (layer.beta) columns.push(["β", (h) => [digits(unpack(layer.beta)[t * H + h])]]);
  if (layer.attention) columns.push(["distance", (h) => [digits(unpack(layer.attention.reach)[h * T + t])], "mean distance of the tokens read"]);
  const rows = range(H).map((h) => make("tr", { className: h === view.head ? "chosen" : "", onclick: () => choose({ head: view.head === h ? ALL : h }) },
    make("td", {}, make("i", { className: "chip", "--hue": hue(h, l) }), `head ${h}`), ...columns.map(([, cell]) => make("td", {}, ...cell(h)))));
  const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, layer.name), ...columns.map(([name]) => make("th", {}, name)))), make("tbody", {}, ...rows));
  const gates = ["write", "read"].filter((gate) => gated(gate)(l)).map((gate) => `${gate} ${digits(entropy(l, gate)[t])}`);
  box.replaceChildren(
    make("div", { className: "what" }, make("code", {}, word(t))),
    make("p", {}, `token ${t} of ${T} · id ${D.ids[t]} · `, ...(isFinite(loss) ? ["loss ", make("b", {}, digits(loss)), ` nats, p = ${digits(Math.exp(-loss), 2)}`] : [t ? "the loss is not finite" : "the first token has no loss"])),
    ...(isFinite(loss) ? [make("p", {}, "most probable: ", ...guesses.flat())] : []),
    make("div", { className: "rows" }, table),
    ...(columns.some(([, , title]) => title) ? [make("p", { className: "key" }, columns.filter(([, , title]) => title).map(([name, , title]) => `${name}: ${title}`).join("; ") + ".")] : []),
    ...(gates.length ? [make("p", {}, "entropy of the gates / log(heads): ", make("b", {}, gates.join(" · ")))] : []),
    ...(layer.attention ? reading(t) : []));
}

function reading(t) {
  const { list, covered } = reads(t, view.layer, view.head), most = list.length ? Math.abs(list[0][1]) : 1;
  const rows = list.slice(0, 8).flatMap(([s, share]) => [
    make("code", {}, word(s)), meter(share / most, share < 0 ? "var(--minus)" : "var(--plus)"), make("span", {}, percent(share)), make("span", {}, s === t ? "0" : `−${t - s}`)]);
  return [make("p", {}, `Largest weights of ${name()}, as fractions of the row:`), make("div", { className: "reads" }, ...rows),
    make("p", { className: "key" }, `The page keeps ${list.length} weights of this row, which cover ${percent(Math.min(1, covered))} of it. Last column: position relative to the token.`)];
}
const name = () => `${D.layers[view.layer].name}, ${view.head === ALL ? "all heads" : `head ${view.head}`}`;

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
