// The residual stream through the layers: what the model would predict after each of them.

import { whyNot } from "./applies.js";
import { card, el, note, percent } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { createWorker } from "./store.js";

const ABOUT = "Logit lens: the prediction if the model skipped the remaining layers. The final norm (if the model has one) and the output head read the vector after each layer.";

/** Returns the view, or null if the model does not have a residual stream. */
export function lensView(store) {
  const { values } = store;
  if (whyNot(store, "lens")) return null;
  const view = { id: "lens", title: "Layers" };
  const stateName = (state) => (state === 0 ? "embedding" : `layer ${state - 1}`);
  const work = createWorker(store);
  const map = heatmap({
    label: "Probability of the best token after each layer, layers in rows and positions in columns",
    height: 300, format: percent,
    describe: (state, position) => {
      const [best] = values.lens(state, position);
      return `${stateName(state)}, token ${position} ${store.name(store.tokens[position])}: ` +
        `predicts ${store.name(best.id)}, ${percent(best.share)}`;
    },
    pick: (_, position) => store.select({ position }),
  });
  const table = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Predictions around the selected token" });
  const detail = el("div", {});
  view.element = el("div", { class: "stack" }, [
    card("All positions", [note("Probability of the best token. Layer 0 is at the top, as in every view of this page. Select a cell to see its neighbours below."), map.element]),
    card("Around the selected token", [note(ABOUT), table]),
    card("At the selected token", [detail]),
  ]);

  let shown = null; // the matrix of the heat map
  function* shares() {
    const rows = values.numStates, columns = store.tokens.length;
    const matrix = { rows, columns, values: new Float32Array(rows * columns), largest: 1, isGrowing: true };
    matrix.hasWholeRows = true;
    matrix.rowNames = Array.from({ length: rows }, (_, state) => stateName(state));
    matrix.columnNames = store.tokens.map((id) => store.name(id));
    matrix.column = store.selection.position;
    shown = matrix;
    let drawn = performance.now();
    for (let position = 0; position < columns; position++) {
      for (let state = 0; state < rows; state++) {
        matrix.values[state * columns + position] = values.lens(state, position)[0].share;
        yield;
      }
      if (performance.now() - drawn > 400) { map.draw(matrix); drawn = performance.now(); }
    }
    map.draw(matrix);
  }
  view.update = (what) => {
    if (what === "strengths") return; // the event "values" follows
    if (what === "values") work(shares());
    else if (shown) map.draw({ ...shown, column: store.selection.position, isGrowing: false }, false);
    table.replaceChildren(lensTable(store, stateName));
    detail.replaceChildren(lensDetail(store, stateName));
  };
  return view;
}

function lensTable(store, stateName) {
  const { values, tokens, selection: { position } } = store;
  const wide = Math.max(2, Math.min(11, Math.floor((document.body.clientWidth - 130) / 92)));
  const first = Math.max(0, Math.min(position - (wide >> 1), tokens.length - wide));
  const places = Array.from({ length: Math.min(wide, tokens.length) }, (_, i) => first + i);
  const heads = places.map((place) =>
    el("th", { scope: "col", class: place === position ? "token here" : "token", text: store.name(tokens[place]) }));
  const rows = Array.from({ length: values.numStates }, (_, state) =>
    el("tr", {}, [
      el("th", { scope: "row", text: stateName(state) }),
      ...places.map((place) => {
        const [best] = values.lens(state, place);
        const isRight = tokens[place + 1] === best.id;
        const title = `${percent(best.share)}${isRight ? ", the token that follows" : ""}`;
        return el("td", { class: isRight ? "lens right" : "lens", title, style: { "--weight": best.share.toFixed(3) } }, [
          el("span", { class: "token", text: store.name(best.id) }),
          el("span", { class: "share", text: percent(best.share) }),
        ]);
      }),
    ]));
  return el("table", {}, [el("thead", {}, [el("tr", {}, [el("th", { scope: "col", text: "after" }), ...heads])]), el("tbody", {}, rows)]);
}

function lensDetail(store, stateName) {
  const { values, selection: { position } } = store;
  const rows = Array.from({ length: values.numStates }, (_, state) =>
    el("tr", {}, [
      el("th", { scope: "row", text: stateName(state) }),
      ...values.lens(state, position).map(({ id, share }) =>
        el("td", { class: "lens", style: { "--weight": share.toFixed(3) } }, [
          el("span", { class: "token", text: store.name(id) }),
          el("span", { class: "share", text: percent(share) }),
        ])),
    ]));
  return el("div", { class: "scroll lens-detail", tabindex: 0, role: "region", "aria-label": "The best five tokens after each layer" }, [
    el("table", {}, [el("tbody", {}, rows)]),
  ]);
}
