// The state of the page: tokens, selection and values. Views subscribe to its changes.

import { capturedValues } from "./captured.js";
import { liveValues } from "./live.js";

const SLICE = 10; // milliseconds of computing between two chances to draw

export function createStore(data) {
  const values = data.mode === "live" ? liveValues(data) : capturedValues(data);
  const store = { data, values, tokens: data.tokens, source: data.source, busy: false };
  store.selection = { position: data.tokens.length - 1, layer: 0, head: firstHead(values.kinds[0]), kind: 0 };
  store.name = (id) => data.names[id] ?? `#${id}`;
  const listeners = [];
  let job = 0;

  store.subscribe = (listener) => listeners.push(listener);
  /** Tells the views what changed: "values", "selection", "strengths", "busy" or "view". */
  store.notify = (what) => listeners.forEach((listener) => listener(what));
  store.select = (change) => {
    Object.assign(store.selection, change);
    store.notify("selection");
  };

  /** Runs a generator in slices; a later call replaces one that has not ended. */
  function run(generator, done) {
    const mine = ++job;
    store.busy = true;
    const slice = () => {
      if (mine !== job) return;
      const until = performance.now() + SLICE;
      let step;
      do step = generator.next(); while (!step.done && performance.now() < until);
      if (!step.done) return void setTimeout(slice, 0);
      store.busy = false;
      done();
      store.notify("values");
      store.notify("busy");
    };
    slice();
    if (store.busy) store.notify("busy");
  }

  /** Computes other tokens, of which `position` is the first that may differ. */
  store.setTokens = (tokens, position = 0, select = store.selection.position) => {
    store.wanted = tokens;
    const first = values.baseline ? commonLength(values.baseline.tokens, tokens, position) : 0;
    run(values.begin(tokens, first), () => {
      store.tokens = tokens;
      store.selection.position = Math.min(select, tokens.length - 1);
    });
  };
  store.recompute = () => {
    store.notify("strengths");
    if (store.wanted !== values.baseline?.tokens) store.setTokens(store.wanted);
    else run(values.beginAgain(), () => {});
  };
  store.setStrength = (layer, head, strength) => {
    values.strengths[layer * data.config.num_heads + head] = strength;
    store.recompute();
  };
  store.resetStrengths = () => {
    values.strengths.fill(1);
    store.recompute();
  };
  return store;
}

/** Returns the head to show first; for a large model only the mean of the heads is stored. */
export const firstHead = (kind) => (kind?.onlyMean ? "mean" : 0);

/** Returns the number of first tokens, at most `most`, that two texts share. */
function commonLength(a, b, most) {
  const end = Math.min(most, a.length, b.length);
  for (let i = 0; i < end; i++) if (a[i] !== b[i]) return i;
  return end;
}

/** Runs slow work in slices, and only the latest work of its kind. */
export function createWorker() {
  let job = 0;
  return (generator) => {
    const mine = ++job;
    const slice = () => {
      if (mine !== job) return;
      const until = performance.now() + SLICE;
      while (performance.now() < until) if (generator.next().done) return;
      setTimeout(slice, 0);
    };
    setTimeout(slice, 0);
  };
}
