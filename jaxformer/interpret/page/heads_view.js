// The head atlas and the direct attribution of a logit. Each part is hidden if there are no data.
//
// data.atlas: {scores: {name: [layers][heads]}, effects: [layers][heads], errors: [layers][heads],
// text}
// data.attribution: {heads: [layers][heads], cross: [layers][heads] if there is cross-attention,
// feedforward: [layers], embedding, rest, logit, target}

import { attributeLogit, attributionReason } from "./attribution.js";
import { barList, card, choice, el, note } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { runLogits } from "./model.js";
import { largestIndices } from "./maths.js";

const NUM_PARTS = 12;
const EFFECT = "effect of removing the head";

/** Returns the view, or null if the page has neither an atlas nor an attribution. */
export function headsView(store) {
  const parts = [atlasPart(store), attributionPart(store)].filter(Boolean);
  if (!parts.length) return null;
  const element = el("div", { class: "stack" }, parts.map((part) => part.element));
  return { id: "heads", title: "Heads", element, update: (what) => parts.forEach((part) => part.update(what)) };
}

function gridMatrix(rows) {
  const columns = rows[0].length;
  return {
    rows: rows.length, columns, hasWholeRows: true, hasWholeColumns: true, values: Float32Array.from(rows.flat()),
    rowNames: rows.map((_, i) => `layer ${i}`), columnNames: rows[0].map((_, i) => `head ${i}`),
  };
}

function atlasPart(store) {
  const { atlas } = store.data;
  if (!atlas) return null;
  const tables = {};
  for (const [name, rows] of Object.entries(atlas.scores)) tables[name.replaceAll("_", " ")] = rows;
  tables[EFFECT] = atlas.effects;
  const names = Object.keys(tables);
  const part = { name: names[0] };
  const map = heatmap({
    label: "Score of each head, layers in rows and heads in columns", height: 360,
    describe: (layer, head, value) => {
      const error = part.name === EFFECT ? ` ± ${atlas.errors[layer][head].toFixed(3)} nats per token` : "";
      return `layer ${layer}, head ${head}: ${part.name} ${value.toFixed(3)}${error}`;
    },
    pick: (layer, head) => store.select({ kind: 0, layer, head }),
  });
  const pickName = choice({
    label: "Score", options: names.map((name) => [name, name]), value: part.name,
    onChange: (name) => { part.name = name; part.update(); },
  });
  part.element = card("Head atlas", [
    pickName.element, map.element,
    note(`${atlas.text} A score says where a head attends. The effect is the increase of the loss if the head gives its mean output. Neither proves a purpose. Select a cell to show this head under Attention.`),
  ]);
  part.update = () => map.draw(gridMatrix(tables[part.name]));
  return part;
}

function attributionPart(store) {
  const { values, data } = store;
  const reason = values.live ? attributionReason(values.model) : null;
  const computes = values.live && reason === null;
  if (!computes && !data.attribution) return null;
  const part = { token: "best" };
  const map = heatmap({
    label: "Contribution of each head to the logit, layers in rows and heads in columns", height: 360,
    describe: (layer, head, value) => `layer ${layer}, head ${head}: ${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(3)}`,
    pick: (layer, head) => store.select({ kind: 0, layer, head }),
  });
  const target = choice({ label: "Token", options: [["best", "best"]], value: "best", onChange: (token) => { part.token = token; part.update("own"); } });
  const about = note("");
  const list = el("div", {});
  part.element = card("Direct attribution of a logit", [
    computes ? target.element : null, about, el("div", { class: "columns" }, [el("div", {}, [el("h3", { text: "Heads" }), map.element]), list]),
  ].filter(Boolean));
  part.update = (what) => {
    if (what === "busy" || what === "strengths") return;
    const found = computes ? computed() : { ...data.attribution, name: store.name(data.attribution.target) };
    about.textContent = sumText(found);
    map.draw(gridMatrix(found.heads));
    list.replaceChildren(el("h3", { text: "Largest contributions" }), largestParts(found));
  };
  function computed() {
    const { position } = store.selection;
    const logits = runLogits(values.model, values.run, position);
    const best = largestIndices(logits, 8);
    const next = store.tokens[position + 1];
    const ids = next === undefined || best.includes(next) ? best : [next, ...best];
    const options = ids.map((id) => [id, `${store.name(id)}${id === next ? " (follows in the text)" : ""}`]);
    const token = ids.includes(Number(part.token)) && part.token !== "best" ? Number(part.token) : best[0];
    target.setOptions(options, String(token));
    return { ...attributeLogit(values.model, values.run, position, token), name: store.name(token) };
  }
  return part;
}

function sumText({ logit, name, rest }) {
  return `How much each part adds to the logit of ${name}. All parts together: ${logit.toFixed(3)}, of which the biases are ${rest.toFixed(3)}.`;
}

function largestParts({ heads, cross, feedforward, embedding }) {
  const named = (kind, rows) => rows.flatMap((row, layer) => row.map((value, head) => [`layer ${layer}, ${kind} ${head}`, value]));
  const parts = [
    ...named("head", heads),
    ...named("cross-attention head", cross ?? []),
    ...feedforward.map((value, layer) => [`layer ${layer}, feed-forward`, value]),
    ["embedding", embedding],
  ].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, NUM_PARTS);
  const most = Math.abs(parts[0][1]) || 1;
  return barList(parts.map(([text, value]) => ({
    text, share: Math.abs(value) / most, shown: `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`, quiet: value < 0,
  })), "Largest contributions", { areTokens: false });
}
