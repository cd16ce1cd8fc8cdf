"use strict";
// What the page knows: its numbers, and what is read off them.
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

const plain = (x) => x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5);
const digits = (x, n = 3) => (!isFinite(x) ? "–" : plain(x) ? x.toLocaleString("en", { maximumSignificantDigits: n }) : x.toExponential(1));
const percent = (x) => (!isFinite(x) ? "–" : (x < 0 ? "−" : "") + (100 * Math.abs(x)).toFixed(Math.abs(x) < 0.0995 ? 1 : 0) + " %");
const horizons = (x) => (x >= 9.9e8 ? "no decay" : digits(x) + " tokens");
const gated = (gate) => (l) => D.layers[l].gates[gate] !== undefined;
const BY = {
  loss: { label: "next-token loss", hue: "var(--warm)", show: (x) => digits(x) + " nats", has: () => true, of: () => unpack(D.loss) },
  write: { label: "share of the write gate", winner: "write", show: percent, has: gated("write"), of: (l, h) => across(shares(l, "write"), byToken(l), l, h) },
  read: { label: "share of the read gate", winner: "read", show: percent, has: gated("read"), of: (l, h) => across(shares(l, "read"), byToken(l), l, h) },
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
