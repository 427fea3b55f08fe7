// The tokens of a text as a list from which one is selected, with the weights of a query.

import { el, svg } from "./dom.js";

const LEAST_BAR = 0.005; // attention weights below this have no bar
const HIGHEST_BAR = 12; // pixels; the rows of tokens are further apart

/** Returns {element, setTokens, select, shade}; `onSelect(position)` is called by user actions. */
export function tokenStrip({ label, onSelect }) {
  const element = el("div", { class: "strip", role: "listbox", tabindex: 0, "aria-label": label });
  const strip = { element, items: [], selected: 0 };

  strip.setTokens = (names) => {
    strip.items = names.map((name, i) => {
      const id = `${label.replace(/\W/g, "")}-${i}`;
      const spoken = `${i}: ${name}`;
      return el("span", { class: "token", role: "option", id, title: spoken, text: name, "aria-selected": "false" });
    });
    // A space lets the line break between tokens.
    element.replaceChildren(...strip.items.flatMap((item) => [item, document.createTextNode(" ")]));
  };
  strip.select = (position) => {
    strip.items[strip.selected]?.setAttribute("aria-selected", "false");
    strip.selected = position;
    strip.items[position]?.setAttribute("aria-selected", "true");
    element.setAttribute("aria-activedescendant", strip.items[position]?.id ?? "");
    scrollListTo(element, strip.items[position]);
  };
  /** Colours the tokens by weights; null removes the colours. */
  strip.shade = (weights) => {
    const largest = weights ? Math.max(...weights, 1e-9) : 1;
    strip.items.forEach((item, i) => {
      item.style.setProperty("--weight", weights ? (weights[i] / largest).toFixed(3) : "0");
    });
  };
  element.addEventListener("click", (event) => {
    const position = strip.items.indexOf(event.target);
    if (position >= 0) onSelect(position);
  });
  element.addEventListener("keydown", (event) => {
    const last = strip.items.length - 1;
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const to = { Home: 0, End: last }[event.key] ?? strip.selected + moves[event.key];
    if (!(to >= 0 && to <= last)) return;
    event.preventDefault();
    onSelect(to);
  });
  return strip;
}

/** Scrolls the list, and not the page, so that an item and the items before it are visible. */
function scrollListTo(list, item) {
  if (!item) return;
  const top = item.offsetTop - list.offsetTop, bottom = top + item.offsetHeight;
  const isVisible = top - 24 >= list.scrollTop && bottom + 6 <= list.scrollTop + list.clientHeight;
  if (!isVisible) list.scrollTop = bottom + 6 - list.clientHeight;
}

/**
 * Marks the query's token, and draws a bar above each token. The height of a bar is the weight,
 * relative to the largest weight. Bars stay between the rows of tokens.
 */
export function drawLines(layer, from, items, weights) {
  layer.replaceChildren();
  if (!from || !weights) return;
  const box = layer.getBoundingClientRect();
  layer.setAttribute("viewBox", `0 0 ${Math.max(1, box.width)} ${Math.max(1, box.height)}`);
  const largest = Math.max(...weights);
  items.forEach((item, key) => {
    if (weights[key] < LEAST_BAR || !isInView(item)) return;
    const { left, top, width } = item.getBoundingClientRect();
    const height = Math.max(1, (HIGHEST_BAR * weights[key]) / largest);
    layer.append(svg("rect", { class: "weight-bar", x: left - box.left, width, y: top - box.top - height - 1, height, rx: 1 }));
  });
  if (!isInView(from)) return;
  const { left, top, width, height } = from.getBoundingClientRect();
  layer.append(svg("rect", {
    class: "query-mark", x: left - box.left - 1.5, y: top - box.top - 1.5, width: width + 3, height: height + 3, rx: 5,
  }));
}

/** Returns whether an item is in the visible part of its scrolling list. */
function isInView(item) {
  const list = item.parentElement.getBoundingClientRect(), { top, bottom } = item.getBoundingClientRect();
  return top >= list.top && bottom <= list.bottom;
}
