// The state of the page: tokens, selection and values. Views subscribe to its changes.

import { capturedValues } from "./captured.js";
import { LIVE_KINDS } from "./kinds.js";

const SLICE = 10; // milliseconds of computing between two chances to draw

export function createStore(data) {
  const values = data.mode === "live" ? LIVE_KINDS[data.kind](data) : capturedValues(data);
  const store = { data, values, tokens: data.tokens, source: data.source, busy: false };
  store.selection = { position: data.tokens.length - 1, layer: 0, head: firstHead(values.kinds[0]), kind: 0 };
  store.name = (id) => data.names[id] ?? `#${id}`;
  const listeners = [], edits = [];
  let job = 0, edited = null; // the text that is being computed
  store.version = 0; // counts the changes of the values

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
      store.version++;
      store.notify("values");
      store.notify("busy");
      nextEdit();
    };
    slice();
    if (store.busy) store.notify("busy");
  }

  /**
   * Edits the text. `change(tokens, position, source)` takes the text, the selected position and the
   * source, if there is one. It returns {tokens, first, select, source}: the new text, the first
   * position that may differ, the one to select, and the new source if it changes.
   *
   * An edit waits until everything before it is computed, so it never acts on an old text or on old
   * values. An edit to a text that the model cannot read has no effect.
   */
  store.edit = (change) => {
    edits.push(change);
    if (!store.busy) nextEdit();
  };
  function nextEdit() {
    while (edits.length && !store.busy) {
      const { position } = store.selection;
      const before = { first: 0, select: position, source: store.source };
      const edit = { ...before, ...edits.shift()([...store.tokens], position, [...(store.source ?? [])]) };
      const fits = ({ length }, most) => length >= 1 && length <= most;
      const reads = !edit.source || fits(edit.source, data.config.max_source_length);
      if (reads && fits(edit.tokens, data.config.max_length)) compute({ ...edit, from: position });
    }
  }
  /** Computes an edit or, if there is none, the same text again. */
  function compute(edit) {
    edited = edit;
    if (!edit) return run(values.beginAgain(), () => {});
    const first = values.baseline ? commonLength(values.baseline.tokens, edit.tokens, edit.first) : 0;
    run(values.begin(edit.tokens, first, edit.source), () => {
      store.selection.position = selectedAfter(edit, store);
      store.tokens = edit.tokens;
      store.source = edit.source;
      edited = null;
    });
  }
  store.setTokens = (tokens, first = 0, select = undefined) =>
    store.edit((_, position) => ({ tokens, first, select: select ?? position }));
  store.recompute = () => {
    store.notify("strengths");
    compute(edited);
  };
  /** Returns the index of a head in `values.strengths`. */
  store.headIndex = (layer, head, kind = store.selection.kind) =>
    (values.kinds[kind].offset ?? 0) + layer * values.kinds[kind].numHeads + head;
  store.setStrength = (layer, head, strength) => {
    values.strengths[store.headIndex(layer, head)] = strength;
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

/** Returns the position to select: the edited one, unless another token was selected meanwhile. */
function selectedAfter({ tokens, first, select, from }, { tokens: old, selection: { position } }) {
  const moved = position > first ? position + tokens.length - old.length : position;
  return Math.max(0, Math.min(position === from ? select : moved, tokens.length - 1));
}

/** Returns the number of first tokens, at most `most`, that two texts share. */
function commonLength(a, b, most) {
  const end = Math.min(most, a.length, b.length);
  for (let i = 0; i < end; i++) if (a[i] !== b[i]) return i;
  return end;
}

/** Returns a function that runs a generator in slices; a new call or new values cancel it. */
export function createWorker(store) {
  let job = 0;
  return (generator) => {
    const mine = ++job, { version } = store;
    const slice = () => {
      if (mine !== job || version !== store.version) return;
      const until = performance.now() + SLICE;
      while (performance.now() < until) if (generator.next().done) return;
      setTimeout(slice, 0);
    };
    setTimeout(slice, 0);
  };
}
