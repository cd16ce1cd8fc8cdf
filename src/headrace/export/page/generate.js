// Continues a text with the model of this folder. headrace.json names the states that the graph takes and returns.
import * as ort from "onnxruntime-web";
import { Tokenizer } from "@huggingface/tokenizers";

ort.env.wasm.numThreads = 1; // more threads work only on a server that sends the headers of cross-origin isolation

const form = document.querySelector("form");
const text = document.querySelector("#text");
const status = document.querySelector("#status");

async function json(file) {
  return (await fetch(file)).json();
}

async function load() {
  const about = await json("headrace.json");
  const tokenizer = new Tokenizer(await json("tokenizer.json"), await json("tokenizer_config.json"));
  const options = { executionProviders: ["wasm"], externalData: about.data };
  const session = await ort.InferenceSession.create("model.onnx", options);
  return { about, tokenizer, session };
}

function empty({ shape, dtype }) {
  const sizes = shape.map((size) => ({ batch: 1, past: 0 })[size] ?? size);
  const count = sizes.reduce((product, size) => product * size, 1);
  return new ort.Tensor(dtype, dtype === "int64" ? new BigInt64Array(count) : new Float32Array(count), sizes);
}

function choose(logits, temperature) {
  const best = logits.reduce((at, logit, i) => (logit > logits[at] ? i : at), 0);
  if (temperature === 0) return best;
  const weights = Array.from(logits, (logit) => Math.exp((logit - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((sum, weight) => sum + weight);
  const at = weights.findIndex((weight) => (left -= weight) < 0);
  return at < 0 ? best : at; // rounding can leave a rest
}

async function* continued({ about, session }, ids, tokens, temperature) {
  let past = Object.fromEntries(about.states.map((state) => [state.past, empty(state)]));
  for (let i = 0; i < tokens && ids.length; i++) {
    const input = new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
    const found = await session.run({ input_ids: input, ...past });
    past = Object.fromEntries(about.states.map((state) => [state.past, found[state.present]]));
    ids = [choose(found.logits.data.subarray(-about.vocab_size), temperature)];
    if (about.eos_token_ids.includes(ids[0])) return;
    yield ids[0];
  }
}

async function write(model) {
  const { tokenizer } = model;
  const prompt = form.prompt.value;
  const ids = tokenizer.encode(prompt).ids;
  const given = ids.length && tokenizer.decode(ids).length; // the answer alone may lose a space at its start
  const tokens = [];
  const began = performance.now();
  for await (const token of continued(model, ids, Number(form.tokens.value), Number(form.temperature.value))) {
    tokens.push(token);
    text.textContent = prompt + tokenizer.decode([...ids, ...tokens]).slice(given);
    status.textContent = `${tokens.length} tokens`;
  }
  const rate = (1000 * tokens.length) / (performance.now() - began);
  status.textContent = `${tokens.length} tokens, ${rate.toFixed(1)} tokens per second`;
}

async function run(model) {
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    await write(model);
  } catch (error) {
    failed(error);
  } finally {
    button.disabled = false;
  }
}

function failed(error) {
  status.textContent = `Error: ${error.message ?? error}`;
}

try {
  const model = await load();
  status.textContent = "Ready.";
  form.onsubmit = (event) => {
    event.preventDefault();
    run(model);
  };
  const given = new URLSearchParams(location.search); // ?prompt=It+was&tokens=20 starts at once
  for (const [name, value] of given) if (form.elements[name]) form.elements[name].value = value;
  if (given.has("prompt")) await run(model);
} catch (error) {
  failed(error);
}
