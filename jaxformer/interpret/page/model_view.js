// The drawing of the model, whose parts open the tabs that show them.

import { card, el, note, percent } from "./dom.js";
import { modelDrawing, partAbout } from "./drawing.js";
import { drawingRows } from "./drawing_parts.js";
import { shownNumber } from "./formula.js";
import { runsDecoder, vectorLength } from "./inside_values.js";
import { tokenPath } from "./token_path.js";

/** Returns the view, or null if the page's data have no drawing. */
export function modelView(store) {
  const { drawing } = store.data;
  if (!drawing) return null;
  const view = { id: "model", title: "Model", layer: 0 };
  const picture = el("div", { class: "drawing-box" });
  const about = el("div", { class: "part-about", "aria-live": "polite" });
  const path = tokenPath(store);
  const total = `${drawing.total.toLocaleString("en")} parameters: the numbers that training adjusts. The number in each part says how many of them it has.`;
  view.element = el("div", { class: "columns drawing-columns" }, [
    card("The model", [note(`${total} Select a part to open the tab that shows it.`), picture], { id: "model-drawing" }),
    el("div", { class: "stack beside" }, [
      card("About the parts", [about, note("Point at a part of the drawing, or move to it with the Tab key.")], { id: "part-about" }),
      path?.element ?? null,
    ]),
  ]);
  const show = (box) => { view.part = box.id; about.replaceChildren(partAbout(box, drawing.total)); };
  const targetOf = (box) => (box.layer !== undefined
    ? `layer ${box.layer} in this drawing`
    : box.opens.map(store.navigation.title).find(Boolean) ?? "the explanation of this part");

  function open(box) {
    if (box.layer !== undefined) return openLayer(box);
    const target = box.opens.find((one) => store.navigation.title(one));
    store.navigation.open(target ?? ["model", "#part-about"]);
  }
  function openLayer({ layer, id }) {
    view.layer = layer;
    if (runsDecoder(store)) store.select({ layer });
    else draw();
    const side = id.startsWith("encoder.") ? "encoder.layers" : "layers";
    picture.querySelector(`.part[data-id^="${side}"]`)?.focus({ preventScroll: true });
  }
  function draw() {
    const rows = drawingRows(drawing, view.layer, selectedToken(store));
    const label = `Drawing of the model: ${store.data.kind}, ${drawing.total.toLocaleString("en")} parameters`;
    const drawn = modelDrawing(rows, { label, targetOf, open, show, stateText: (state) => lengthText(store, state) });
    picture.replaceChildren(drawn.element);
    const shown = drawn.boxes.find(({ box }) => box.id === view.part) ?? drawn.boxes[0];
    show(shown.box);
  }
  view.update = (what) => {
    if (what === "strengths" || what === "busy") return; // the event "values" follows
    if (runsDecoder(store)) view.layer = store.selection.layer;
    const focused = document.activeElement?.closest?.(".drawing .part")?.dataset.id;
    draw();
    if (focused) picture.querySelector(`.part[data-id="${focused}"]`)?.focus({ preventScroll: true });
    path?.update();
  };
  return view;
}

/** Returns what the drawing says about the selected token and its prediction. */
function selectedToken(store) {
  const { values, tokens, selection: { position } } = store;
  const { ids, logits, logSum } = values.distribution(position);
  const share = percent(Math.exp(logits[0] - logSum));
  return { position, id: tokens[position], name: store.name(tokens[position]), best: store.name(ids[0]), share };
}

/** Returns the length of the selected token's vector in a state; null if the page does not run the model. */
function lengthText(store, state) {
  if (!runsDecoder(store)) return null;
  const { values, selection: { position } } = store;
  const rows = values.run.states[state], dim = rows.length / values.run.length;
  return `vector of length ${shownNumber(vectorLength(rows.subarray(position * dim, (position + 1) * dim)), 2)}`;
}
