// The residual stream of one token: the lengths of its states and of what the layers add.

import { card, el, note, svg } from "./dom.js";
import { shownNumber } from "./formula.js";
import { streamLengths } from "./inside_values.js";

const CHART = { width: 640, height: 220, left: 46, right: 10, top: 12, bottom: 30 };

/** Returns {element, update}: a chart and a table of lengths by layer. */
export function streamCard(store) {
  const { config } = store.values.model;
  const title = el("h2", {});
  const chart = el("div", {});
  const table = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Lengths by layer" });
  const stream = config.residual ? "the residual stream, to which each layer adds its output" : "a state, which each layer replaces";
  const about = `A token's vector goes through the layers as ${stream}. Its length is the square root of the sum of the squares of its ${config.embed_dim} numbers.`;
  const legend = el("p", { class: "legend" }, [
    el("span", { class: "key-state", text: "state" }), el("span", { class: "key-attention", text: "attention output" }), el("span", { class: "key-mlp", text: "MLP output" }),
  ]);
  const element = card(null, [title, note(about), legend, el("div", { class: "split wide" }, [chart, table])], { id: "inside-stream" });
  function update() {
    const { values: { model, run }, selection: { position } } = store;
    const lengths = streamLengths(model, run, position);
    title.textContent = `Length of the vector of token ${position} ‘${store.name(store.tokens[position])}’ through the layers`;
    chart.replaceChildren(lengthChart(lengths));
    table.replaceChildren(lengthTable(lengths));
  }
  return { element, update };
}

const stateLabel = (state) => (state === 0 ? "embedding" : `layer ${state - 1}`);

function lengthChart({ states, attention, feedforward }) {
  const { width, height, left, right, top, bottom } = CHART;
  const most = Math.max(...states, ...attention, ...feedforward) || 1;
  const x = (state) => left + ((width - left - right) * (state + 0.5)) / states.length;
  const y = (length) => top + (height - top - bottom) * (1 - length / most);
  const bar = Math.max(3, Math.min(16, (width - left - right) / states.length / 5));
  const every = Math.ceil(states.length / 12);
  const bars = attention.flatMap((length, layer) => [[length, -bar, "length-attention"], [feedforward[layer], 0, "length-mlp"]]
    .map(([value, shift, name]) => svg("rect", { class: name, x: x(layer + 1) + shift, y: y(value), width: bar, height: Math.max(0, height - bottom - y(value)) })));
  const labels = states.map((_, state) => (state % every ? null : svg("text", { x: x(state), y: height - 10, "text-anchor": "middle", text: stateLabel(state) })));
  const scale = [0, most / 2, most].map((value) => svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end", text: shownNumber(value, 1) }));
  const lines = [0, most / 2, most].map((value) => svg("path", { class: "axis", d: `M ${left} ${y(value)} H ${width - right}` }));
  const path = states.map((value, state) => `${state ? "L" : "M"} ${x(state)} ${y(value)}`).join(" ");
  const dots = states.map((value, state) => svg("circle", { class: "length-dot", cx: x(state), cy: y(value), r: 3.5 }));
  const label = `Lengths of the states: ${states.map((value, state) => `${stateLabel(state)} ${shownNumber(value, 2)}`).join(", ")}.`;
  return svg("svg", { class: "lengths", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    [...lines, ...scale, ...bars, svg("path", { class: "spread", d: path }), ...dots, ...labels]);
}

function lengthTable({ states, attention, feedforward }) {
  const heads = ["", "attention output", "MLP output", "state after"].map((text) => el("th", { scope: "col", text }));
  const rows = states.map((state, i) => el("tr", {}, [
    el("th", { scope: "row", text: stateLabel(i) }),
    ...[attention[i - 1], feedforward[i - 1], state].map((value) => el("td", { text: value === undefined ? "" : shownNumber(value, 2) })),
  ]));
  return el("table", { class: "keys" }, [el("thead", {}, [el("tr", {}, heads)]), el("tbody", {}, rows)]);
}
