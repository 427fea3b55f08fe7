// What happens inside a layer, for the selected token: attention, feed-forward, stream, positions.

import { attentionCard, insideHead } from "./attention_steps.js";
import { card, choice, el, note } from "./dom.js";
import { runsDecoder } from "./inside_values.js";
import { mlpCard } from "./mlp_steps.js";
import { positionCard } from "./position_part.js";
import { streamCard } from "./stream_part.js";

/** Returns the view, or null if the page does not run a decoder. */
export function insideView(store) {
  if (!runsDecoder(store)) return null;
  const { num_layers, num_heads } = store.data.config;
  const numbers = (name, num) => Array.from({ length: num }, (_, i) => [i, `${name} ${i}`]);
  const layer = choice({ label: "Layer", options: numbers("layer", num_layers), value: 0, onChange: (x) => store.select({ layer: Number(x) }) });
  const head = choice({ label: "Head", options: numbers("head", num_heads), value: 0, onChange: (x) => store.select({ head: Number(x) }) });
  const about = note("");
  const controls = card(null, [
    el("h2", { text: "Inside one layer, for one token" }),
    el("div", { class: "tools" }, [layer.element, head.element]), about,
  ]);
  const parts = [attentionCard(store), mlpCard(store), streamCard(store), positionCard(store)].filter(Boolean);
  const element = el("div", { class: "stack" }, [controls, ...parts.map((part) => part.element)]);
  const view = { id: "inside", title: "Inside", element };
  view.update = (what) => {
    if (what === "strengths" || what === "busy") return; // the event "values" follows
    const { position, layer: chosen, head: selected } = store.selection;
    layer.input.value = chosen;
    head.input.value = insideHead(store);
    const instead = typeof selected === "number" ? "" : ` A ${selected} of several heads has no query, so this tab shows head 0.`;
    about.textContent = `Token ${position} ‘${store.name(store.tokens[position])}’ is selected. Select another token in the text above.${instead}`;
    for (const part of parts) part.update();
  };
  return view;
}
