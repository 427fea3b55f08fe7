// The states of an RNN or an LSTM over time: gates, candidates and cells, and the formula of a unit.

import { card, choice, el, note, nextId } from "./dom.js";
import { gradientCard } from "./gradient_card.js";
import { heatmap } from "./heatmap.js";
import { CELL_PARTS } from "./recurrent.js";

const PART_NAMES = {
  input: "input gate i", forget: "forget gate f", candidate: "candidate g", output: "output gate o",
  cell: "cell state c", hidden: "hidden state h",
};
const CELL_FORMULAS = {
  lstm: [
    ["i = σ(W_i x + U_i h₋ + b_i)", "how much of the candidate to write"],
    ["f = σ(W_f x + U_f h₋ + b_f)", "how much of the old cell state to keep"],
    ["g = tanh(W_g x + U_g h₋ + b_g)", "the new content"],
    ["o = σ(W_o x + U_o h₋ + b_o)", "how much of the cell state to show"],
    ["c = f · c₋ + i · g", "the new cell state"], ["h = o · tanh(c)", "the new hidden state"],
  ],
  rnn: [["h = tanh(W x + U h₋ + b)", "the new hidden state"]],
};

/** Returns the view, or null for a model without recurrent layers in the page. */
export function statesView(store) {
  const { values, data } = store;
  if (!values.recurrent) return null;
  const { cell, num_layers } = data.config;
  const parts = CELL_PARTS[cell];
  const view = { id: "states", title: cell === "lstm" ? "Gates" : "States", layer: 0, part: parts.includes("cell") ? "cell" : "hidden", unit: 0 };
  const show = () => view.update("own");
  const layer = choice({
    label: "Layer", options: Array.from({ length: num_layers }, (_, i) => [i, `layer ${i}`]), value: 0,
    onChange: (value) => { view.layer = Number(value); show(); },
  });
  const part = choice({
    label: "Values", options: parts.map((name) => [name, PART_NAMES[name]]), value: view.part,
    onChange: (name) => { view.part = name; show(); },
  });
  const unit = unitField(data.config.hidden_dim, (number) => { view.unit = number; show(); });
  const map = heatmap({
    label: "Values of all units over time, tokens in rows and units in columns", height: 520,
    describe: (token, u, value) => `Token ${token} ${store.name(store.tokens[token])}, unit ${u}: ${PART_NAMES[view.part]} = ${value.toFixed(3)}`,
    pick: (token, u) => { view.unit = u; store.select({ position: token }); },
  });
  const title = el("h2", {});
  const steps = el("div", { class: "steps" });
  const gradients = values.gradients ? gradientCard(store, view) : null;
  const formulas = el("ul", { class: "formulas" }, CELL_FORMULAS[cell].map(([formula, meaning]) =>
    el("li", {}, [el("span", { class: "formula" }, withSubscripts(formula)), el("span", { class: "note", text: meaning })])));
  const about = note("x is the layer's input at this token. h₋ and c₋ are the states after the token before it. σ gives numbers from 0 to 1.");
  view.element = el("div", { class: "stack" }, [
    el("div", { class: "columns narrow" }, [
      card(cell === "lstm" ? "LSTM" : "RNN", [layer.element, parts.length > 1 ? part.element : null, formulas, about].filter(Boolean)),
      el("section", { class: "card" }, [title, map.element, note("Blue is positive, orange is negative. Select a cell to see its numbers below.")]),
    ]),
    card("One unit, step by step", [unit.element, steps]),
    gradients?.element,
  ].filter(Boolean));

  view.update = (what) => {
    if (what === "strengths" || what === "busy") return;
    const rows = values.run.layers[view.layer][view.part];
    const { length } = values.run;
    title.textContent = `${capitalized(PART_NAMES[view.part])} in layer ${view.layer}`;
    const columns = data.config.hidden_dim;
    const matrix = { rows: length, columns, values: rows, rowNames: store.tokens.map(store.name), row: store.selection.position };
    map.draw(view.part === "cell" ? matrix : { ...matrix, largest: 1 });
    unit.set(view.unit);
    steps.replaceChildren(unitTable(store, view));
    gradients?.update(what);
  };
  return view;
}

/** Returns the parts of a formula, in which the letter after a "_" is a subscript. */
function withSubscripts(formula) {
  return formula.split(/_(\w)/).map((text, i) => (i % 2 ? el("sub", { text }) : text));
}

const capitalized = (text) => text[0].toUpperCase() + text.slice(1);

/** Returns a labelled field for the number of a unit. */
function unitField(size, onChange) {
  const id = nextId("unit");
  const input = el("input", { id, type: "number", min: 0, max: size - 1, step: 1, value: 0 });
  input.addEventListener("change", () => {
    const number = Math.max(0, Math.min(size - 1, Math.round(Number(input.value) || 0)));
    onChange(number);
  });
  const element = el("div", { class: "choice" }, [el("label", { for: id, text: `Unit (0 to ${size - 1})` }), input]);
  return { element, set: (number) => { input.value = number; } };
}

/** Returns the values of a unit at the last tokens up to the selected one, and its cell sums. */
function unitTable(store, { layer, unit }) {
  const { values, data, selection: { position } } = store;
  const { cell, hidden_dim: size } = data.config;
  const parts = CELL_PARTS[cell];
  const read = (name, t) => t < 0
    ? (values.run.initial?.[layer][name][unit] ?? 0)
    : values.run.layers[layer][name][t * size + unit];
  const places = Array.from({ length: Math.min(8, position + 1) }, (_, i) => Math.max(0, position - 7) + i);
  const head = el("tr", {}, [el("th", { scope: "col", text: "token" }), ...parts.map((name) => el("th", { scope: "col", text: PART_NAMES[name].split(" ").at(-1) }))]);
  const rows = places.map((t) => el("tr", {}, [
    el("th", { scope: "row", class: t === position ? "token here" : "token", text: `${t} ${store.name(store.tokens[t])}` }),
    ...parts.map((name) => el("td", { class: "number", text: signedNumber(read(name, t)) })),
  ]));
  return el("div", {}, [
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Values of the unit at the last tokens" }, [
      el("table", {}, [el("thead", {}, [head]), el("tbody", {}, rows)]),
    ]),
    ...cellSums(cell, (name) => read(name, position), (name) => read(name, position - 1)),
  ]);
}

const signedNumber = (x) => `${x < 0 ? "−" : ""}${Math.abs(x).toFixed(3)}`;

/** Returns the formulas of the state with the numbers of the selected token. */
function cellSums(cell, now, before) {
  if (cell === "rnn") return [];
  const text = [
    `c = f · c₋ + i · g = ${signedNumber(now("forget"))} · ${signedNumber(before("cell"))} + ${signedNumber(now("input"))} · ${signedNumber(now("candidate"))} = ${signedNumber(now("cell"))}`,
    `h = o · tanh(c) = ${signedNumber(now("output"))} · ${signedNumber(Math.tanh(now("cell")))} = ${signedNumber(now("hidden"))}`,
  ];
  return text.map((line) => el("p", { class: "formula", text: line }));
}
