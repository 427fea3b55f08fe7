// Two models on one text: predictions, losses, divergence and attention. JAX computed all values.
//
// data.compare: {offset, divergence: [length], models: [{title, top: {ids, shares}, loss,
// attention}]}. Position i predicts the token i + offset of the text.

import { barList, card, choice, el, note, percent } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { capturedAttention } from "./captured.js";
import { firstHead } from "./store.js";

/** Returns the view, or null if the page has one model. */
export function compareView(store) {
  const { compare, tokens } = store.data;
  if (!compare) return null;
  const view = { id: "compare", title: "Compare" };
  const parts = [divergencePart(store), predictionPart(store), attentionPart(store)].filter(Boolean);
  const about = store.values.live
    ? "JAX computed these values for the original text. Edits of the text and of heads do not change them."
    : "JAX computed these values.";
  view.element = el("div", { class: "stack" }, [
    card("Two models on one text", [note(about), lossTable(compare, tokens.length)]), ...parts.map((part) => part.element),
  ]);
  view.update = (what) => {
    if (what !== "strengths") for (const part of parts) part.update();
  };
  return view;
}

const meanOfLoss = ({ loss }) => loss.data.reduce((sum, x) => sum + x, 0) / loss.data.length;

function lossTable({ models, divergence }, length) {
  const cells = (row) => row.map((text, i) => el(i ? "td" : "th", { text, class: i ? "numbers" : "", scope: i ? null : "row" }));
  const rows = models.map((model) => {
    const mean = meanOfLoss(model);
    return el("tr", {}, cells(model.loss.data.length
      ? [model.title, `${mean.toFixed(3)} nats`, Math.exp(mean).toPrecision(4)] : [model.title, "–", "–"]));
  });
  const heads = ["model", "mean loss", "perplexity"].map((text) => el("th", { scope: "col", text }));
  const mean = divergence.data.reduce((sum, x) => sum + x, 0) / length;
  return el("div", {}, [
    el("div", { class: "scroll" }, [el("table", { class: "losses" }, [el("thead", {}, [el("tr", {}, heads)]), el("tbody", {}, rows)])]),
    note(`Mean Jensen–Shannon divergence of the two distributions: ${mean.toFixed(3)} bits. 0: the models predict the same; 1: they share no token.`),
  ]);
}

/** Returns the selected position, or the last one of the original text if the text became longer. */
const comparedPosition = (store) => Math.min(store.selection.position, store.data.tokens.length - 1);

function divergencePart(store) {
  const { compare: { divergence, models, offset }, tokens } = store.data;
  const length = tokens.length, names = tokens.map((id) => store.name(id));
  const pick = (_, position) => position < store.tokens.length && store.select({ position });
  const strip = heatmap({
    label: "Jensen–Shannon divergence of the two models at each position, in bits", height: 130,
    describe: (_, position, value) => `token ${position} ${names[position]}: the models differ by ${value.toFixed(3)} bits`, pick,
  });
  const shares = heatmap({
    label: "Probability of the actual token, models in rows and positions in columns", height: 160,
    describe: (row, position, value, isHidden) => isHidden
      ? `token ${position} ${names[position]}: the text ends here`
      : `${models[row].title}, token ${position} ${names[position]}: ${percent(value)} for ${names[position + offset]}, loss ${models[row].loss.data[position].toFixed(3)} nats`,
    pick, format: percent, hiddenText: "the text ends",
  });
  const actual = new Float32Array(2 * length), hidden = new Uint8Array(2 * length);
  models.forEach(({ loss }, row) => {
    for (let i = 0; i < length; i++) {
      if (i < loss.data.length) actual[row * length + i] = Math.exp(-loss.data[i]);
      else hidden[row * length + i] = 1;
    }
  });
  const element = card("Where the models differ", [
    note("Jensen–Shannon divergence of the two distributions at each position, in bits. Select a cell to see both predictions below."),
    strip.element, el("h3", { text: offset ? "Probability of the actual next token" : "Probability of the token itself" }), shares.element,
  ]);
  const update = () => {
    const column = comparedPosition(store);
    strip.draw({ rows: 1, columns: length, values: divergence.data, rowNames: ["bits"], columnNames: names, column, largest: 1 });
    shares.draw({
      rows: 2, columns: length, values: actual, rowNames: models.map(({ title }) => title), columnNames: names, column,
      hidden: offset ? hidden : null, largest: 1,
    });
  };
  return { element, update };
}

function predictionPart(store) {
  const { compare: { models, offset }, tokens } = store.data;
  const body = el("div", {});
  const update = () => {
    const position = comparedPosition(store), target = tokens[position + offset];
    const lists = models.map(({ title, top, loss }) => {
      const num = top.ids.shape[1];
      const rows = Array.from({ length: num }, (_, i) => {
        const id = top.ids.data[position * num + i];
        return { text: store.name(id), share: top.shares.data[position * num + i], mark: id === target ? "actual" : "" };
      });
      const actual = target === undefined ? "The text ends here."
        : `Actual token ${store.name(target)}: ${percent(Math.exp(-loss.data[position]))}, loss ${loss.data[position].toFixed(3)} nats.`;
      return el("div", {}, [el("h3", { text: title }), barList(rows, `Predictions of ${title}`), note(actual)]);
    });
    const what = offset ? "After" : "At";
    body.replaceChildren(el("h3", { class: "token-title", text: `${what} token ${position}, ${store.name(tokens[position])}` }), el("div", { class: "compared-pair" }, lists));
  };
  return { element: card("Predictions", [body]), update };
}

/** Returns the two attention maps side by side, or null if a model has no attention. */
function attentionPart(store) {
  const { models } = store.data.compare;
  if (models.some(({ attention }) => attention.length === 0)) return null;
  const sides = models.map((model) => attentionSide(store, model));
  return {
    element: card("Attention", [note("Choose a layer and a head of each model."), el("div", { class: "compared-pair" }, sides.map((side) => side.element))]),
    update: () => sides.forEach((side) => side.update()),
  };
}

function attentionSide(store, { title, attention }) {
  const values = capturedAttention(attention);
  const side = { kind: 0, layer: 0, head: firstHead(values.kinds[0]) };
  const names = (what) => (what === "source" ? store.source : store.data.tokens).map((id) => store.name(id));
  const kind = () => values.kinds[side.kind];
  const map = heatmap({
    label: `Attention weights of ${title}, queries in rows and keys in columns`, height: 520, format: percent,
    describe: (row, column, value, isHidden) => {
      const query = names(kind().queries)[row], key = names(kind().keys)[column];
      return `${row} ${query} ${isHidden ? "cannot see" : "attends to"} ${column} ${key}${isHidden ? "" : `: ${percent(value)}`}`;
    },
  });
  const choose = (name) => (value) => {
    side[name] = Number.isNaN(Number(value)) ? value : Number(value);
    if (name === "kind") fill();
    update();
  };
  const kinds = choice({ label: "Kind", options: values.kinds.map(({ label }, i) => [i, label]), value: 0, onChange: choose("kind") });
  const layers = choice({ label: "Layer", options: [], value: 0, onChange: choose("layer") });
  const heads = choice({ label: "Head", options: [], value: 0, onChange: choose("head") });
  function fill() {
    const { layers: numbers, numHeads, onlyMean } = kind();
    Object.assign(side, { layer: 0, head: firstHead(kind()) });
    layers.setOptions(numbers.map((number, i) => [i, `layer ${number}`]), 0);
    const own = onlyMean ? [] : Array.from({ length: numHeads }, (_, i) => [i, `head ${i}`]);
    heads.setOptions([...own, ["mean", "mean of all heads"], ...(onlyMean ? [] : [["max", "max of all heads"]])], side.head);
  }
  function update() {
    const matrix = values.attention(side.kind, side.layer, side.head);
    const row = kind().queries === "tokens" ? comparedPosition(store) : undefined;
    map.draw({ ...matrix, hidden: values.hidden(side.kind, side.layer), rowNames: names(kind().queries), columnNames: names(kind().keys), row });
  }
  fill();
  const controls = [values.kinds.length > 1 ? kinds.element : null, layers.element, heads.element].filter(Boolean);
  return { element: el("div", {}, [el("h3", { text: title }), el("div", { class: "compared-head" }, controls), map.element]), update };
}
