// The selected token after each layer: the length of its vector, and the best prediction from it.

import { card, el, note, percent } from "./dom.js";
import { shownNumber } from "./formula.js";
import { runsDecoder, streamLengths } from "./inside_values.js";
import { createWorker } from "./store.js";

/** Returns {element, update}, or null if the page does not run the model. */
export function tokenPath(store) {
  const { values } = store;
  if (!runsDecoder(store)) return null;
  const work = createWorker(store);
  const title = el("h2", {});
  const list = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The token after each layer" });
  const about = note("Length: the size of the token's vector. Best token: what the output head would predict from this vector.");
  const element = card(null, [title, about, list], { id: "token-path" });

  function update() {
    const { position } = store.selection;
    const { states } = streamLengths(values.model, values.run, position);
    title.textContent = `Token ${position} ‘${store.name(store.tokens[position])}’ after each layer`;
    const rows = states.map((length, state) => pathRow(state, length, states.length - 1));
    list.replaceChildren(el("table", { class: "keys path" }, [
      el("thead", {}, [el("tr", {}, ["after", "length", "best token", "probability"].map((text) => el("th", { scope: "col", text })))]),
      el("tbody", {}, rows.map(({ row }) => row)),
    ]));
    work(predictions(rows, position));
  }
  function* predictions(rows, position) {
    for (const [state, { best, share }] of rows.entries()) {
      const [found] = values.lens(state, position);
      best.textContent = store.name(found.id);
      share.textContent = percent(found.share);
      share.style.setProperty("--weight", found.share.toFixed(3));
      yield;
    }
  }
  return { element, update };
}

function pathRow(state, length, last) {
  const best = el("td", { class: "token" }), share = el("td", { class: "weight" });
  const name = state === 0 ? "embedding" : `layer ${state - 1}${state === last ? " (last)" : ""}`;
  const row = el("tr", {}, [el("th", { scope: "row", text: name }), el("td", { text: shownNumber(length, 2) }), best, share]);
  return { row, best, share };
}
