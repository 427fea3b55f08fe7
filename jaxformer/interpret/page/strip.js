// The tokens of a text as a list from which one is selected, with the weights of a query.

import { el, svg } from "./dom.js";

const MOST_LINES = 10;
const LEAST_LINE = 0.03; // attention weights below this have no line

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

/** Scrolls the list, and not the page, so that an item is visible. */
function scrollListTo(list, item) {
  if (!item) return;
  const top = item.offsetTop - list.offsetTop, bottom = top + item.offsetHeight;
  if (top - 24 < list.scrollTop) list.scrollTop = top - 24;
  else if (bottom + 6 > list.scrollTop + list.clientHeight) list.scrollTop = bottom + 6 - list.clientHeight;
}

/** Draws lines from the query's token to the tokens with the largest weights. */
export function drawLines(layer, from, items, weights) {
  layer.replaceChildren();
  if (!from || !weights) return;
  const box = layer.getBoundingClientRect();
  layer.setAttribute("viewBox", `0 0 ${Math.max(1, box.width)} ${Math.max(1, box.height)}`);
  const at = (item) => {
    const { left, top, width } = item.getBoundingClientRect();
    return [left + width / 2 - box.left, top - box.top];
  };
  const [x, y] = at(from);
  const order = Array.from(weights, (w, i) => i).sort((a, b) => weights[b] - weights[a]);
  for (const key of order.slice(0, MOST_LINES)) {
    if (weights[key] < LEAST_LINE || items[key] === from) continue;
    const [u, v] = at(items[key]);
    const lift = Math.min(22, 8 + Math.abs(x - u) / 12);
    const path = `M ${x} ${y} C ${x} ${y - lift}, ${u} ${v - lift}, ${u} ${v}`;
    layer.append(svg("path", { d: path, class: "line", "stroke-width": 1 + 4 * weights[key] }));
  }
}
