// Attention weights: an overview of all heads, one heat map, and the strength of a head.

import { button, card, choice, el, note, percent, rovingKeys, slider } from "./dom.js";
import { heatmap, thumbnail } from "./heatmap.js";
import { createWorker, firstHead } from "./store.js";

export function attentionView(store, panel) {
  const { values } = store;
  const view = { id: "attention", title: "Attention" };
  if (values.kinds.length === 0) {
    view.element = el("div", {}, [card("Attention", [note(`A model of type "${store.data.kind}" does not have attention heads.`)])]);
    view.update = () => panel.shade(null);
    return view;
  }
  const names = (what) => (what === "source" ? store.source : store.tokens).map((id) => store.name(id));
  const kind = () => values.kinds[store.selection.kind];
  const map = heatmap({
    label: "Attention weights of the selected head, queries in rows and keys in columns",
    describe: (row, column, value) => {
      const query = names(kind().queries)[row], key = names(kind().keys)[column];
      return `${row} ${query} attends to ${column} ${key}: ${percent(value)}`;
    },
    pick: (row) => kind().queries === "tokens" ? store.select({ position: row }) : shade(row),
  });
  const kindChoice = choice({
    label: "Kind", options: values.kinds.map(({ label }, i) => [i, label]), value: 0,
    onChange: (value) =>
      store.select({ kind: Number(value), layer: 0, head: firstHead(values.kinds[value]) }),
  });
  const overview = headOverview(store);
  const title = el("h2", { class: "heat-title" });
  const strength = values.live ? strengthControl(store) : null;
  const left = card("Heads", [values.kinds.length > 1 ? kindChoice.element : null, overview.element, strength?.element]
    .filter(Boolean));
  const right = el("section", { class: "card" }, [title, map.element]);
  view.element = el("div", { class: "columns" }, [left, right]);

  function shade(query) {
    const { layer, head } = store.selection;
    const { columns, values: weights } = values.attention(store.selection.kind, layer, head);
    const { queries, keys } = kind();
    panel.shade({ query, queries, keys, weights: weights.subarray(query * columns, (query + 1) * columns) });
  }
  view.update = (what) => {
    overview.update(what);
    strength?.update();
    if (what === "strengths") return; // the values follow
    const { layer, head, position } = store.selection;
    kindChoice.input.value = store.selection.kind;
    const label = typeof head === "number" ? `head ${head}` : `${head} of all heads`;
    title.textContent = `Layer ${kind().layers[layer]}, ${label}`;
    const { queries, keys } = kind();
    const matrix = values.attention(store.selection.kind, layer, head);
    const query = queries === "tokens" ? position : 0;
    map.draw({ ...matrix, rowNames: names(queries), columnNames: names(keys), row: query });
    shade(query);
  };
  return view;
}

/** Returns the grid of small pictures: a row for each layer, with the mean of its heads first. */
function headOverview(store) {
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
      rows.push(el("span", { class: "head-layer", text: `L${layers[layer]}` }));
      for (const head of heads) {
        const canvas = el("canvas", { width: 44, height: 44, "aria-hidden": "true" });
        const text = typeof head === "number" ? `${head}` : head;
        const label = typeof head === "number" ? `layer ${layers[layer]}, head ${head}` : `layer ${layers[layer]}, ${head} of all heads`;
        const cell = el("button", { type: "button", class: "head", tabindex: -1, "aria-label": label }, [canvas, el("span", { text })]);
        cell.addEventListener("click", () => store.select({ layer, head }));
        cells.push({ cell, canvas, layer, head });
        rows.push(cell);
      }
    }
    grid.style.setProperty("--columns", columns);
    grid.replaceChildren(...rows);
  }
  function* pictures() {
    for (const { canvas, layer, head } of cells) {
      thumbnail(canvas, values.attention(store.selection.kind, layer, head));
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
        && values.strengths[item.layer * store.data.config.num_heads + item.head] === 0;
      item.cell.classList.toggle("off", isOff);
    }
    if (isNew || what === "values") work(pictures());
  }
  rovingKeys(grid, () => columns);
  return { element: el("div", { class: "scroll" }, [grid]), update };
}

/** Returns the controls that weaken, switch off or double the output of the selected head. */
function strengthControl(store) {
  const { values, data } = store;
  const index = () => store.selection.layer * data.config.num_heads + store.selection.head;
  const apply = (strength) => store.setStrength(store.selection.layer, store.selection.head, strength);
  const control = slider({
    label: "Strength", min: 0, max: 2, step: 0.05, value: 1, format: (x) => `× ${x.toFixed(2)}`, onInput: apply,
  });
  const off = button("Switch off", () => apply(values.strengths[index()] === 0 ? 1 : 0), { "aria-pressed": "false" });
  const reset = button("Reset all heads", () => store.resetStrengths());
  const about = note("Factor for the head's output; 0 ablates the head. The page then recomputes the model.");
  const element = el("div", { class: "strength" }, [
    el("h3", { text: "Change this head" }), control.element, el("div", { class: "buttons" }, [off, reset]), about,
  ]);
  const update = () => {
    const isHead = typeof store.selection.head === "number";
    const value = isHead ? values.strengths[index()] : 1;
    if (Number(control.input.value) !== value) control.set(value);
    control.input.disabled = off.disabled = !isHead;
    off.setAttribute("aria-pressed", String(value === 0));
    reset.disabled = values.strengths.every((x) => x === 1);
  };
  return { element, update };
}
