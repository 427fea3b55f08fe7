// The grid of small pictures of all heads, and the controls of the selected head.

import { button, el, note, rovingKeys, slider } from "./dom.js";
import { thumbnail } from "./heat_cells.js";
import { disableFor, reasonNote } from "./reasons.js";
import { createWorker } from "./store.js";

/** Returns the attention weights of a head, with the cells that the model's rule masks. */
export function maskedWeights(values, kind, layer, head) {
  return { ...values.attention(kind, layer, head), hidden: values.hidden?.(kind, layer) ?? null };
}

/** Returns the grid of small pictures: a row for each layer, with the mean of its heads first. */
export function headOverview(store) {
  const { values } = store;
  const work = createWorker(store);
  const grid = el("div", { class: "heads", role: "group", "aria-label": "Heads. Arrow keys move, Enter selects." });
  let shownKind = -1, cells = [], columns = 1;

  function build() {
    const { numLayers, numHeads, onlyMean, layers } = values.kinds[store.selection.kind];
    const heads = ["mean", "max", ...Array(numHeads).keys()].filter((head) => !onlyMean || head === "mean");
    columns = heads.length;
    cells = [];
    const rows = [];
    for (let layer = 0; layer < numLayers; layer++) {
      const buttons = heads.map((head) => {
        const canvas = el("canvas", { width: 44, height: 44, "aria-hidden": "true" });
        const text = typeof head === "number" ? `${head}` : head;
        const label = typeof head === "number" ? `layer ${layers[layer]}, head ${head}` : `layer ${layers[layer]}, ${head} of all heads`;
        const cell = el("button", { type: "button", class: "head", tabindex: -1, "aria-label": label, title: label }, [canvas, el("span", { text })]);
        cell.addEventListener("click", () => store.select({ layer, head }));
        cells.push({ cell, canvas, layer, head });
        return cell;
      });
      rows.push(el("span", { class: "head-layer", text: `L${layers[layer]}` }), el("div", { class: "head-cells" }, buttons));
    }
    grid.style.setProperty("--columns", columns);
    grid.replaceChildren(...rows);
  }
  function* pictures() {
    for (const { canvas, layer, head } of cells) {
      thumbnail(canvas, maskedWeights(values, store.selection.kind, layer, head));
      yield;
    }
  }
  function update(what) {
    const isNew = shownKind !== store.selection.kind;
    if (isNew) build();
    shownKind = store.selection.kind;
    const { layer, head } = store.selection;
    for (const item of cells) {
      const isSelected = item.layer === layer && item.head === head;
      item.cell.setAttribute("aria-pressed", String(isSelected));
      item.cell.tabIndex = isSelected ? 0 : -1;
      const isOff = values.live && typeof item.head === "number"
        && values.strengths[store.headIndex(item.layer, item.head)] === 0;
      item.cell.classList.toggle("off", isOff);
    }
    if (isNew || what === "values") work(pictures());
  }
  document.addEventListener("themechange", () => { if (cells.length) work(pictures()); });
  rovingKeys(grid, () => columns);
  return { element: grid, update };
}

/** Returns the controls that weaken, switch off or double the output of the selected head. */
export function strengthControl(store) {
  const { values } = store;
  const index = () => store.headIndex(store.selection.layer, store.selection.head);
  const apply = (strength) => store.setStrength(store.selection.layer, store.selection.head, strength);
  const control = slider({
    label: "Strength", min: 0, max: 2, step: 0.05, value: 1, format: (x) => `× ${x.toFixed(2)}`, onInput: apply,
  });
  const off = button("Switch off", () => apply(values.strengths[index()] === 0 ? 1 : 0));
  const reset = button("Reset all heads", () => store.resetStrengths());
  const reasons = reasonNote([off, reset]);
  const about = note("Factor for the head's output; 0 ablates the head. The page then recomputes the model.");
  const element = el("div", { class: "strength" }, [
    control.element, el("div", { class: "buttons" }, [off, reset]), reasons.element, about,
  ]);
  const update = () => {
    const isHead = typeof store.selection.head === "number";
    const value = isHead ? values.strengths[index()] : 1;
    if (Number(control.input.value) !== value) control.set(value);
    const reason = isHead ? null : "select one head, not all heads of a layer.";
    disableFor(control.input, reason);
    disableFor(off, reason);
    off.textContent = value === 0 ? "Switch on" : "Switch off";
    disableFor(reset, values.strengths.every((x) => x === 1) ? "all heads have strength 1." : null);
    reasons.update();
  };
  return { element, update };
}
