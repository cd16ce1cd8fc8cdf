// Events and start-up.

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
  const wanted = $("find").value.toLowerCase(), labels = D.labels.map((label) => label.toLowerCase()), starts = [];
  const text = labels.join("");
  let end = 0;
  for (const label of labels) { starts.push(end); end += label.length; }
  view.matches = [];
  for (const span of spans) span.classList.remove("hit");
  for (let at = wanted ? text.indexOf(wanted) : -1; at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    const hits = range(T).filter((t) => labels[t] && starts[t] < at + wanted.length && starts[t] + labels[t].length > at);
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

// --- start-up

const mixers = [...new Set(D.layers.map((layer) => layer.mixer))].join(" + ");
const counts = [...new Set(D.layers.filter((layer) => layer.attention || Object.keys(layer.gates).length).map((layer) => layer.heads))];
$("title").textContent = `${mixers}, ${D.layers.length} layer${D.layers.length > 1 ? "s" : ""}${counts.length === 1 ? ` of ${counts[0]} head${counts[0] > 1 ? "s" : ""}` : ""}`;
$("summary").textContent = `${digits(D.parameters / 1e6)} M parameters · ${T.toLocaleString("en")} tokens${D.cut ? ` (${D.cut.toLocaleString("en")} more are not shown)` : ""} · ${D.mean === null ? "the mean loss is not finite" : `mean loss ${D.mean.toFixed(3)} nats, perplexity ${digits(Math.exp(D.mean))}`}`;
$("text").append(...spans);
grid();
const asked = new URLSearchParams(location.hash.slice(1)), number = (key, otherwise) => (asked.has(key) ? Number(asked.get(key)) : otherwise);
choose({ layer: number("layer", 0), head: number("head", ALL), by: asked.get("by") ?? (gated("write")(0) ? "write" : "loss") });
if (asked.has("token")) go(number("token", 0), true, true);
document.documentElement.dataset.tokens = spans.length;
document.documentElement.dataset.ready = Math.round(performance.now());
