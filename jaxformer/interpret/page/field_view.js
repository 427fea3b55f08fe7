// The receptive field of a convolutional model, layer by layer, and the values of its channels.

import { card, choice, el, note, svg } from "./dom.js";
import { kernelOffsets } from "./convolution.js";
import { heatmap } from "./heatmap.js";

const FIELD_ROW = 46, FIELD_LEFT = 74, FIELD_COLUMN = 15;

/** Returns the view, or null for a model without convolutions in the page. */
export function fieldView(store) {
  const { values, data: { config } } = store;
  if (!config.dilations || !values.live) return null;
  const view = { id: "field", title: "Receptive field", state: config.num_layers };
  const picture = el("div", { class: "field-picture" });
  const facts = el("p", { class: "note", "aria-live": "polite" });
  const stateName = (state) => (state === 0 ? "embedding" : `layer ${state - 1}`);
  const state = choice({
    label: "Values after", value: view.state, options: Array.from({ length: config.num_layers + 1 }, (_, i) => [i, stateName(i)]),
    onChange: (value) => { view.state = Number(value); view.update("own"); },
  });
  const map = heatmap({
    label: "Values of all channels, tokens in rows and channels in columns", height: 520,
    describe: (token, channel, value) => `Token ${token} ${store.name(store.tokens[token])}, channel ${channel}: ${value.toFixed(3)}`,
    pick: (token) => store.select({ position: token }),
  });
  const title = el("h2", {});
  const kernels = config.dilations.map((dilation, i) => `layer ${i}: dilation ${dilation}`).join(", ");
  view.element = el("div", { class: "stack" }, [
    card("What the selected output reads", [
      facts, picture,
      note(`Each layer reads ${config.kernel_size} positions of the layer below it: its own position and earlier ones, at distances that are multiples of the dilation (${kernels}).`),
    ]),
    el("section", { class: "card" }, [title, state.element, map.element, note("Blue is positive, orange is negative. Select a cell to select its token.")]),
  ]);

  view.update = (what) => {
    if (what === "strengths" || what === "busy") return;
    const { position } = store.selection;
    const levels = receptiveField(config, position);
    const inputs = levels[0];
    facts.textContent = `The output at token ${position}, ${store.name(store.tokens[position])}, reads ${inputs.length} of the ${position + 1} tokens up to it. ` +
      `At any position it reads at most ${fieldSize(config)} tokens.`;
    picture.replaceChildren(fieldPicture(store, levels, stateName));
    title.textContent = `Channels after ${stateName(view.state)}`;
    const rows = values.run.states[view.state];
    map.draw({ rows: values.run.length, columns: config.embed_dim, values: rows, rowNames: store.tokens.map(store.name), row: position });
  };
  return view;
}

/** Returns the positions of each state that the output at `position` depends on, the embedding first. */
export function receptiveField(config, position) {
  const levels = [[position]];
  for (let layer = config.num_layers - 1; layer >= 0; layer--) {
    const offsets = kernelOffsets(config, layer);
    const read = new Set(levels[0].flatMap((at) => offsets.map((offset) => at + offset)));
    levels.unshift([...read].filter((at) => at >= 0).sort((a, b) => a - b));
  }
  return levels;
}

/** Returns the number of tokens that an output reads in a long text. */
export function fieldSize(config) {
  const far = config.dilations.reduce((sum, dilation) => sum + dilation * (config.kernel_size - 1), 0);
  return receptiveField(config, far)[0].length;
}

/** Returns a picture with a row of dots for each state, from the tokens at the bottom to the output. */
function fieldPicture(store, levels, stateName) {
  const { config } = store.data;
  const position = levels.at(-1)[0];
  const width = Math.min(1640, Math.max(260, document.body.clientWidth - 92));
  const most = Math.floor((width - FIELD_LEFT) / FIELD_COLUMN);
  const columns = Math.min(most, Math.max(2, position - levels[0][0] + 1));
  const first = position - columns + 1;
  const step = Math.min(54, (width - FIELD_LEFT - 10) / columns);
  const x = (at) => FIELD_LEFT + (at - first + 0.5) * step;
  const y = (state) => 16 + (levels.length - 1 - state) * FIELD_ROW;
  const shown = (at) => at >= Math.max(0, first);
  const lines = [], dots = [];
  levels.forEach((positions, state) => {
    const read = new Set(positions);
    for (let at = Math.max(0, first); at <= position; at++) {
      dots.push(svg("circle", { class: read.has(at) ? "dot read" : "dot", cx: x(at), cy: y(state), r: Math.min(7, step / 3) }));
    }
    if (state === 0) return;
    const offsets = kernelOffsets(config, state - 1);
    for (const at of positions.filter(shown)) {
      for (const below of offsets.map((offset) => at + offset).filter(shown)) {
        lines.push(svg("line", { class: "read-line", x1: x(at), y1: y(state), x2: x(below), y2: y(state - 1) }));
      }
    }
  });
  const bottom = y(0);
  const tokens = Array.from({ length: columns }, (_, i) => first + i).filter((at) => at >= 0).map((at) =>
    svg("text", { class: levels[0].includes(at) ? "read-name" : "", x: 0, y: 0, transform: `translate(${x(at) + 4} ${bottom + 14}) rotate(60)`, text: store.name(store.tokens[at]).slice(0, 10) }));
  const names = levels.map((_, state) => svg("text", { x: 0, y: y(state) + 4, text: stateName(state) }));
  const hidden = levels[0].filter((at) => !shown(at)).length;
  const label = `The output at token ${position} reads ${levels.map((positions, state) => `${positions.length} positions of ${stateName(state)}`).reverse().join(", ")}.`;
  const total = FIELD_LEFT + columns * step + 40;
  return el("div", {}, [
    svg("svg", { viewBox: `0 0 ${total} ${bottom + 86}`, style: { "max-width": `${total}px` }, role: "img", "aria-label": label }, [...lines, ...dots, ...names, ...tokens]),
    hidden ? note(`Earlier tokens that the output also reads, but that do not fit into the picture: ${hidden}.`) : null,
  ].filter(Boolean));
}
