// A chart of the gradients of one loss at the states of all earlier tokens.

import { card, el, note, svg } from "./dom.js";
import { createWorker } from "./store.js";
import { largestIndices } from "./maths.js";

const GRADIENT_HEIGHT = 170, GRADIENT_LEFT = 46;

/** Returns {element, update}; `view.layer` is the layer that is shown. */
export function gradientCard(store, view) {
  const { values } = store;
  const work = createWorker(store);
  const about = note("");
  const chart = el("div", {});
  const element = card("Gradients through time", [about, chart, note(
    "This page computes the gradients with the chain rule, backwards from the loss (backpropagation through time). " +
    "A curve that falls to the left says that early tokens hardly teach this prediction.")]);
  const part = { element, norms: null };
  let shown = "";

  function* compute(position, token, name) {
    const steps = values.gradients(position, token);
    let step = steps.next();
    for (; !step.done; step = steps.next()) yield;
    part.norms = step.value;
    shown = name;
    draw(position);
  }
  function draw(position) {
    chart.replaceChildren(gradientChart(store, part.norms, view.layer, position));
  }
  part.update = () => {
    const { position } = store.selection;
    const follows = store.tokens[position + 1];
    const token = follows ?? largestIndices(values.logits(position), 1)[0];
    const which = follows === undefined ? "the most probable next token" : "the token that follows";
    about.textContent = `Loss: −log p(${store.name(token)}) after token ${position}, ${store.name(store.tokens[position])} (${which}). ` +
      `The chart shows how much it changes with the states of layer ${view.layer} at each token.`;
    const name = `${store.version}/${position}/${token}`;
    if (name === shown) draw(position);
    else work(compute(position, token, name));
  };
  return part;
}

/** Returns a chart with one curve for each part of the state, on a logarithmic axis. */
function gradientChart(store, norms, layer, position) {
  const width = Math.min(1100, Math.max(220, document.body.clientWidth - 110));
  const curves = Object.entries(norms).map(([name, rows]) => [name, rows[layer]]);
  const all = curves.flatMap(([, norm]) => [...norm]).filter((x) => x > 0);
  const high = Math.ceil(Math.log10(Math.max(...all, 1e-12)));
  const low = Math.max(high - 8, Math.min(high - 1, Math.floor(Math.log10(Math.min(...all, 1)))));
  const x = (t) => GRADIENT_LEFT + ((t + 0.5) / (position + 1)) * (width - GRADIENT_LEFT);
  const y = (value) => GRADIENT_HEIGHT * (1 - (Math.max(low, Math.log10(Math.max(value, 1e-30))) - low) / (high - low));
  const every = Math.max(1, Math.ceil((high - low) / 4));
  const ticks = Array.from({ length: high - low + 1 }, (_, i) => low + i).filter((i) => (high - i) % every === 0);
  const labels = Math.ceil((position + 1) / Math.max(1, Math.floor((width - GRADIENT_LEFT) / 64)));
  const marks = curves.flatMap(([name, norm]) => [
    svg("polyline", { class: `gradient ${name}`, points: Array.from(norm, (value, t) => `${x(t)},${y(value)}`).join(" ") }),
    ...Array.from(norm, (value, t) => svg("circle", { class: `gradient-dot ${name}`, cx: x(t), cy: y(value), r: position < 60 ? 3.5 : 2 }, [
      svg("title", { text: `token ${t} ${store.name(store.tokens[t])}: ${value.toExponential(2)}` }),
    ])),
  ]);
  const label = `Norms of the gradients in layer ${layer}. ` + curves.map(([name, norm]) =>
    `${name} state: ${norm[0].toExponential(1)} at the first token, ${norm[position].toExponential(1)} at the last.`).join(" ");
  return el("figure", { "data-norms": JSON.stringify(Object.fromEntries(curves.map(([name, norm]) => [name, [...norm]]))) }, [
    el("figcaption", {}, [el("span", { class: "numbers" }, curves.map(([name]) =>
      el("span", { class: `key ${name}`, text: name === "cell" ? "‖∂loss/∂c‖, cell state  " : "‖∂loss/∂h‖, hidden state  " })))]),
    svg("svg", { viewBox: `0 -8 ${width + 8} ${GRADIENT_HEIGHT + 34}`, role: "img", "aria-label": label }, [
      ...ticks.flatMap((i) => [
        svg("line", { class: "axis", x1: GRADIENT_LEFT, x2: width, y1: y(10 ** i), y2: y(10 ** i) }),
        svg("text", { x: GRADIENT_LEFT - 6, y: y(10 ** i) + 4, "text-anchor": "end", text: `1e${i}` }),
      ]),
      ...marks,
      ...store.tokens.slice(0, position + 1).map((id, t) => (position - t) % labels ? null
        : svg("text", { x: x(t), y: GRADIENT_HEIGHT + 20, "text-anchor": "middle", text: store.name(id).slice(0, 8) })).filter(Boolean),
    ]),
  ]);
}
