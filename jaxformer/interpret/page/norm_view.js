// The lesson on LayerNorm: a vector before and after the norm, with γ and β of your choice.

import { whyNot } from "./applies.js";
import { button, card, choice, el, note, slider, svg } from "./dom.js";
import { deviationOf, meanOf } from "./maths.js";

const LESSON = Float32Array.of(8, -2, 5, 1, 2, -1, 1, 2);
const SKEWED = Float32Array.from({ length: 128 }, (_, i) => 4 * Math.exp(1.4 * Math.sin(12.9898 * (i + 1))) - 3);
const EPSILON = 1e-5;
const BINS = 41;

/** Returns the view, or null if the model does not have norms. */
export function normView(store) {
  const { values, data } = store;
  if (whyNot(store, "norm")) return null;
  const view = { id: "norm", title: "LayerNorm", source: "model", scale: 1, bias: 0 };
  view.layer = values.numStates >> 1;
  if (view.layer >= values.numStates - 1) view.layer = 0;
  const options = [["model", "residual stream of this model"], ["lesson", "8 numbers of the lesson"], ["skewed", "128 skewed numbers"]];
  const show = () => view.update("own");
  const source = choice({
    label: "Vector x", options, value: view.source, onChange: (value) => { view.source = value; show(); },
  });
  const layer = choice({
    label: "Before layer", options: Array.from({ length: Math.max(1, values.numStates - 1) }, (_, i) => [i, `layer ${i}`]), value: view.layer,
    onChange: (value) => { view.layer = Number(value); show(); },
  });
  const format = (x) => x.toFixed(1);
  const scale = slider({
    label: "γ, the scale", min: 0, max: 4, step: 0.1, value: 1, format, onInput: (x) => { view.scale = x; show(); },
  });
  const bias = slider({
    label: "β, the bias", min: -3, max: 3, step: 0.1, value: 0, format, onInput: (x) => { view.bias = x; show(); },
  });
  const set = (g, b) => { scale.set(view.scale = g); bias.set(view.bias = b); show(); };
  const reset = button("γ = 1, β = 0", () => set(1, 0));
  const learned = el("p", { class: "note" });
  const figures = el("div", { class: "figures" });
  const beside = el("div", { class: "figures" });
  const depth = el("div", {});
  const formula = el("p", { class: "formula", text: "y = γ · (x − μ) / √(σ² + ε) + β" });
  const controls = card("LayerNorm", [
    formula, source.element, layer.element, scale.element, bias.element,
    el("div", { class: "buttons" }, [reset]), learned,
  ]);
  const results = el("div", { class: "stack" }, [
    card("Before and after", [figures]),
    card("Pre-norm beside post-norm", [
      note("A sub-layer adds its output a to the stream x. Pre-norm leaves the sum unchanged, so the stream grows. Post-norm normalises the sum."), beside, depth,
    ]),
  ]);
  view.element = el("div", { class: "columns narrow" }, [controls, results]);

  view.update = (what) => {
    if (what === "strengths" || what === "busy") return;
    layer.element.hidden = view.source !== "model";
    const { x, added, place } = chosenVectors(store, view);
    const y = layerNorm(x, view.scale, view.bias);
    const range = rangeOf([x, y]);
    figures.replaceChildren(
      histogram("before", place ? `x, token ${place.position}` : "x", x, range),
      histogram("after", "y = LayerNorm(x)", y, range));
    const sum = x.map((value, i) => value + added[i]);
    const normed = layerNorm(sum, view.scale, view.bias);
    const both = rangeOf([sum, normed]);
    beside.replaceChildren(
      histogram("before", "pre-norm: x + a", sum, both),
      histogram("after", "post-norm: LayerNorm(x + a)", normed, both));
    learned.textContent = learnedText(store, view);
    depth.replaceChildren(...(place ? [spreadChart(values.spreads(place.position), place.position, data.config.norm_position)] : []));
  };
  return view;
}

/** Returns {x, added, place}: the vector, what a sub-layer adds, and where they are captured. */
function chosenVectors(store, view) {
  if (view.source !== "model") {
    const x = view.source === "lesson" ? LESSON : SKEWED;
    return { x, added: x.map((_, i) => 1.5 * Math.cos(2.1 * i)), place: null };
  }
  const places = store.values.vectorPositions();
  const wanted = store.selection.position;
  const position = places === null ? wanted
    : places.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
  const { input, added } = store.values.vectors(view.layer, position);
  return { x: input, added: added ?? input.map(() => 0), place: { position } };
}

export function layerNorm(x, scale, bias) {
  const mean = meanOf(x);
  const factor = scale / Math.sqrt(deviationOf(x) ** 2 + EPSILON);
  return Float64Array.from(x, (value) => (value - mean) * factor + bias);
}

function learnedText(store, view) {
  const norm = view.source === "model" && store.values.norm(view.layer);
  if (!norm?.scale) return "";
  const offset = store.data.config.norm === "rms_one_plus" ? 1 : 0;
  const kind = store.data.config.norm === "layer" ? "LayerNorm" : "RMSNorm, which does not subtract the mean and does not have β";
  const scale = `γ from ${(offset + Math.min(...norm.scale)).toFixed(2)} to ${(offset + Math.max(...norm.scale)).toFixed(2)}`;
  const bias = norm.bias ? ` and β from ${Math.min(...norm.bias).toFixed(2)} to ${Math.max(...norm.bias).toFixed(2)}` : "";
  return `This model uses ${kind}. In this layer it learned ${scale}${bias}, one for each feature.`;
}

function rangeOf(vectors) {
  let low = Infinity, high = -Infinity;
  for (const x of vectors) for (const value of x) { low = Math.min(low, value); high = Math.max(high, value); }
  const margin = 0.04 * (high - low || 1);
  return [low - margin, high + margin];
}

/** Returns the width of a picture that is not scaled down on a phone. */
const availableWidth = () => Math.max(240, document.body.clientWidth - 76);

/** Returns a histogram with its mean and its standard deviation. */
function histogram(kind, title, x, [low, high]) {
  const counts = new Array(BINS).fill(0);
  for (const value of x) counts[Math.min(BINS - 1, Math.floor(((value - low) / (high - low)) * BINS))]++;
  const most = Math.max(...counts);
  const width = Math.min(400, availableWidth()), height = 120, bin = width / BINS;
  const at = (value) => ((value - low) / (high - low)) * width;
  const bars = counts.map((count, i) =>
    svg("rect", { class: `fill-${kind}`, x: i * bin + 0.5, width: bin - 1, y: height * (1 - count / most), height: (height * count) / most }));
  const mean = meanOf(x), spread = deviationOf(x);
  const ticks = [low + 0.04 * (high - low), 0, high - 0.04 * (high - low)].filter((t) => t >= low && t <= high);
  const labels = ticks.map((tick) =>
    svg("text", { x: at(tick), y: height + 16, "text-anchor": "middle", text: tick.toFixed(1) }));
  const numbers = `mean ${(Math.abs(mean) < 5e-4 ? 0 : mean).toFixed(3)}, standard deviation ${spread.toFixed(3)}`;
  return el("figure", { "data-mean": mean, "data-spread": spread, "data-kind": kind }, [
    el("figcaption", {}, [el("b", { text: title }), el("span", { class: "numbers", text: numbers })]),
    svg("svg", { viewBox: `-14 -4 ${width + 28} ${height + 26}`, role: "img", "aria-label": `Histogram of ${title}: ${numbers}` }, [
      ...bars,
      svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
      svg("line", { class: "mean", x1: at(mean), x2: at(mean), y1: 0, y2: height }),
      ...labels,
    ]),
  ]);
}

/** Returns a chart of the standard deviation of the residual stream after each layer. */
function spreadChart(spreads, position, normPosition) {
  const width = Math.min(820, availableWidth()), height = 110;
  const most = Math.max(...spreads);
  const x = (i) => (i / Math.max(1, spreads.length - 1)) * width;
  const y = (value) => height * (1 - value / most);
  const points = spreads.map((value, i) => `${x(i)},${y(value)}`).join(" ");
  const title = `Standard deviation of this model's stream at token ${position} (norm_position "${normPosition}")`;
  const every = Math.ceil((spreads.length * 110) / width);
  const labels = spreads.map((value, i) => i % every ? null : svg("text", {
    x: x(i), y: height + 18, "text-anchor": i === 0 ? "start" : i === spreads.length - 1 ? "end" : "middle",
    text: `${i === 0 ? "embedding" : `L${i - 1}`}: ${value.toFixed(2)}`,
  })).filter(Boolean);
  return el("figure", {}, [
    el("figcaption", {}, [el("b", { text: title })]),
    svg("svg", { viewBox: `-8 -8 ${width + 16} ${height + 32}`, role: "img", "aria-label": title }, [
      svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
      svg("polyline", { class: "spread", points }),
      ...spreads.map((value, i) => svg("circle", { class: "fill-after", cx: x(i), cy: y(value), r: 4 })),
      ...labels,
    ]),
  ]);
}
