// Attention weights: an overview of all heads, one heat map, and the strength of a head.

import { card, choice, el, note, percent } from "./dom.js";
import { headOverview, maskedWeights, strengthControl } from "./head_overview.js";
import { heatmap } from "./heatmap.js";
import { firstHead } from "./store.js";

/** Returns the view, or null if the model does not have attention. */
export function attentionView(store, panel) {
  const { values } = store;
  if (values.kinds.length === 0) return null;
  const view = { id: "attention", title: "Attention" };
  const names = (what) => (what === "source" ? store.source : store.tokens).map((id) => store.name(id));
  const kind = () => values.kinds[store.selection.kind];
  const map = heatmap({
    label: "Attention weights of the selected head, queries in rows and keys in columns",
    describe: (row, column, value, isHidden) => {
      const query = names(kind().queries)[row], key = names(kind().keys)[column];
      if (isHidden) return `${row} ${query} cannot see ${column} ${key}: the model masks this key`;
      return `${row} ${query} attends to ${column} ${key}: ${percent(value)}`;
    },
    pick: (row) => kind().queries === "tokens" ? store.select({ position: row }) : shade(row),
    format: percent,
  });
  const kindChoice = choice({
    label: "Kind", options: values.kinds.map(({ label }, i) => [i, label]), value: 0,
    onChange: (value) =>
      store.select({ kind: Number(value), layer: 0, head: firstHead(values.kinds[value]) }),
  });
  const overview = headOverview(store);
  const title = el("h2", { class: "heat-title" });
  const strength = values.live ? strengthControl(store) : null;
  const isWide = Math.max(...values.kinds.map(({ numHeads }) => numHeads)) > 10;
  view.element = el("div", { class: isWide ? "attention many" : "attention" }, [
    card("Heads", [values.kinds.length > 1 ? kindChoice.element : null, overview.element].filter(Boolean), { class: "card heads-card" }),
    el("section", { class: "card map-card" }, [title, note("Rows are queries, columns are keys. The bars above the tokens show the weights in the outlined row."), map.element]),
    strength && card("Change this head", [strength.element], { class: "card strength-card" }),
  ]);

  function shade(query) {
    const { layer, head } = store.selection;
    const { columns, values: weights } = values.attention(store.selection.kind, layer, head);
    const { queries, keys } = kind();
    panel.shade({ query, queries, keys, weights: weights.subarray(query * columns, (query + 1) * columns) });
  }
  view.update = (what) => {
    overview.update(what);
    strength?.update();
    if (what === "strengths") return; // the event "values" follows
    const { layer, head, position } = store.selection;
    kindChoice.input.value = store.selection.kind;
    const label = typeof head === "number" ? `head ${head}` : `${head} of all heads`;
    title.textContent = `Layer ${kind().layers[layer]}, ${label}`;
    const { queries, keys } = kind();
    const matrix = maskedWeights(values, store.selection.kind, layer, head);
    const query = queries === "tokens" ? position : 0;
    map.draw({ ...matrix, rowNames: names(queries), columnNames: names(keys), row: query });
    shade(query);
  };
  return view;
}
