// The dependency matrix: which output depends on which input, as measured and by the rule.

import { card, el, note } from "./dom.js";
import { heatmap } from "./heatmap.js";

export function dependencyView(store) {
  const { dependency } = store.data;
  const size = dependency.matrix.length;
  const names = store.data.tokens.slice(0, size).map((id) => store.name(id));
  const flat = dependency.matrix.flat(), rule = dependency.rule.flat();
  const wrong = flat.flatMap((found, i) => (found !== rule[i] ? [[Math.floor(i / size), i % size]] : []));
  const { data: effects } = dependency.effects;
  const map = heatmap({
    label: "Dependency matrix, outputs in rows and inputs in columns", hiddenText: "cannot depend (by the rule)",
    describe: (row, column) => {
      const i = row * size + column;
      const apart = rule[i] ? "does not depend on it" : "cannot depend on it";
      const verdict = flat[i] ? `depends on it, largest change of a logit ${effects[i].toPrecision(3)}` : apart;
      return `Output ${row} ${names[row]}, input ${column} ${names[column]}: ${verdict}`;
    },
  });
  const edges = flat.reduce((a, b) => a + b, 0);
  const verdict = dependency.holds
    ? "The measured dependencies are exactly those that the model's rule allows."
    : "The measured dependencies differ from the model's rule. Outlined cells show where.";
  const facts = [
    ["Edges", `${edges} of ${size * size}`],
    ["Compared with the rule", dependency.summary],
    ["Methods", dependency.witnesses.map((name) => METHODS[name] ?? name).join("; ")],
    ...dependency.remarks.map((text) => ["Remark", text]),
  ];
  const list = el("dl", { class: "facts" }, facts.flatMap(([name, text]) => [el("dt", { text: name }), el("dd", { text })]));
  const about = note(`For the first ${size === 1 ? "token" : `${size} tokens`} of the original text. The colour shows the largest change of a logit when the input token is replaced.`);
  const element = el("div", { class: "columns narrow" }, [
    card("Which output depends on which input", [el("p", { class: dependency.holds ? "good" : "bad", text: verdict }), about, list]),
    el("section", { class: "card" }, [el("h2", { text: "Dependency matrix" }), map.element]),
  ]);
  const view = { id: "dependency", title: "Dependency", element };
  const hidden = Uint8Array.from(flat, (found, i) => Number(!found && !rule[i]));
  const most = effects.reduce((a, b) => Math.max(a, b), 0) || 1;
  view.update = () => {
    // Every dependency is visible, however small.
    const values = Float32Array.from(flat, (found, i) => (found ? effects[i] + 0.12 * most : 0));
    map.draw({ rows: size, columns: size, values, hidden, rowNames: names, columnNames: names, marks: wrong });
  };
  return view;
}

const METHODS = {
  taint: "taint (follows all paths of the computation)",
  derivative: "derivatives",
  change: "change (replaces one token at a time)",
};
