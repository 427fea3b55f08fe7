// The table of attention: for each key its score, its weight, and its part of the output.

import { el } from "./dom.js";
import { shownNumber } from "./formula.js";

const MOST_KEYS = 16; // keys with a row of their own
const MOST_HIDDEN = 4; // masked keys with a row of their own

/**
 * Returns {shown, rest, hidden, best}: the visible keys of largest weight in the order of the text,
 * the other visible keys, the masked keys, and the key of largest weight.
 */
export function keyGroups(keys) {
  const visible = keys.filter(({ hidden }) => !hidden);
  const order = [...visible].sort((a, b) => b.weight - a.weight || a.position - b.position);
  const chosen = new Set(order.slice(0, MOST_KEYS));
  return {
    shown: visible.filter((key) => chosen.has(key)), rest: visible.filter((key) => !chosen.has(key)),
    hidden: keys.filter(({ hidden }) => hidden), best: order[0],
  };
}

const weightText = (weight) => `${(100 * weight).toFixed(1)}%`;

/** Returns why a key cannot be seen; null if it can. */
export const hiddenReason = (hidden, window) =>
  hidden === "later" ? "comes later" : hidden === "window" ? `outside the window of ${window} tokens` : null;

/** Returns the table of the keys; its last row has the sums. */
export function attentionTable(found) {
  const { config, feature, groups, total, output } = found;
  const columns = tableColumns(found);
  const heads = columns.map(({ title, about }) => el("th", { scope: "col", title: about, text: title }));
  const rows = groups.shown.map((key) => tableRow(found, columns, key));
  if (groups.rest.length) rows.push(restRow(found, columns));
  const sums = { share: shownNumber(total), weight: "100.0%", part: shownNumber(output[feature]) };
  const foot = el("tr", { class: "total" }, [
    el("th", { scope: "row", text: "sum" }), ...tableCells(columns, ({ id }) => sums[id]),
  ]);
  return el("table", { class: "keys", "data-feature": feature }, [
    el("caption", { text: `Keys of ${found.name(found.position)}, head ${found.head} of layer ${found.layer}. Part: weight × number ${feature} of the value, of ${config.head_dim}.` }),
    el("thead", {}, [el("tr", {}, [el("th", { scope: "col", text: "key" }), ...heads])]),
    el("tbody", {}, [...rows, ...hiddenRows(found, columns)]),
    el("tfoot", {}, [foot]),
  ]);
}

function tableColumns({ config, feature, scale }) {
  const has = {
    capped: config.attention_softcap !== null,
    bias: Boolean(config.slopes || config.relative),
  };
  const scaled = config.attention_scale === null ? "q·k/√d" : `${shownNumber(scale, 2)}·q·k`;
  return [
    { id: "scaled", title: scaled, about: "The product of the query and the key, scaled", value: (key) => shownNumber(key.scaled) },
    { id: "capped", title: "capped", about: `Limited to ±${config.attention_softcap} by tanh`, value: (key) => shownNumber(key.capped) },
    { id: "bias", title: "position bias", about: "Added to the score because of the distance", value: (key) => shownNumber(key.bias) },
    { id: "score", title: "after mask", about: "The score, or −∞ if the key is masked", value: (key) => (key.hidden ? "−∞" : shownNumber(key.score)) },
    { id: "share", title: "exp(s − max)", about: "e to the score, after the largest score was subtracted", value: (key) => shownNumber(key.share) },
    { id: "weight", title: "weight", about: "The share of the sum", value: (key) => weightText(key.weight) },
    { id: "part", title: `part of number ${feature}`, name: "part", about: "Weight × this number of the value", value: (key) => shownNumber(key.weight * key.value[feature]) },
  ].filter(({ id }) => has[id] ?? true);
}

/** Returns the cells of a row. On a narrow screen, each cell shows the name of its column. */
function tableCells(columns, read, style = {}) {
  return columns.map((column) => el("td", {
    class: column.id, "data-name": column.name ?? column.title, style: column.id === "weight" ? style : {}, text: read(column) ?? "",
  }));
}

function tableRow(found, columns, key) {
  const shade = { "--weight": key.weight.toFixed(3) };
  return el("tr", { class: key.position === found.position ? "here" : "", "data-key": key.position }, [
    el("th", { scope: "row", class: "token", text: `${key.position} ${found.short(key.position)}` }),
    ...tableCells(columns, (column) => column.value(key), shade),
  ]);
}

/** Returns one row for all visible keys without a row of their own. */
function restRow({ groups: { rest }, feature }, columns) {
  const sum = (read) => rest.reduce((total, key) => total + read(key), 0);
  const sums = {
    share: shownNumber(sum((key) => key.share)), weight: weightText(sum((key) => key.weight)),
    part: shownNumber(sum((key) => key.weight * key.value[feature])),
  };
  return el("tr", { class: "rest" }, [
    el("th", { scope: "row", text: `${rest.length} other keys` }), ...tableCells(columns, ({ id }) => sums[id]),
  ]);
}

/** Returns a row for each masked key, or one row for many of them. */
function hiddenRows(found, columns) {
  const { hidden } = found.groups;
  const cells = (text, values) => el("tr", { class: "masked" }, [
    el("th", { scope: "row", class: "token", text }), ...tableCells(columns, ({ id }) => values[id]),
  ]);
  if (hidden.length <= MOST_HIDDEN) {
    return hidden.map((key) => cells(
      `${key.position} ${found.short(key.position)} (${hiddenReason(key.hidden, found.window)})`,
      Object.fromEntries(columns.map((column) => [column.id, column.value(key)])),
    ));
  }
  return ["window", "later"].map((why) => [why, hidden.filter((key) => key.hidden === why)]).filter(([, keys]) => keys.length)
    .map(([why, keys]) => cells(`${keys[0].position} to ${keys.at(-1).position} (${hiddenReason(why, found.window)})`, {
      score: "−∞", share: "0.000", weight: "0.0%", part: "0.000",
    }));
}
