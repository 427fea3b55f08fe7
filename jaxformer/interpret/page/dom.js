// Elements and controls. Texts are always set as text content, so no token can become markup.

const SVG = "http://www.w3.org/2000/svg";
let lastId = 0;

/** Creates an element. `options` are attributes, `text`, `on` {event: listener} and `style`. */
export function el(tag, options = {}, children = []) {
  return build(document.createElement(tag), options, children);
}

export function svg(tag, options = {}, children = []) {
  return build(document.createElementNS(SVG, tag), options, children);
}

function build(element, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value;
    else if (name === "on") Object.entries(value).forEach(([e, f]) => element.addEventListener(e, f));
    else if (name === "style") Object.entries(value).forEach(([k, v]) => element.style.setProperty(k, v));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...[children].flat().filter((child) => child !== null));
  return element;
}

export const nextId = (stem) => `${stem}-${++lastId}`;

export const percent = (share) => share === 0 ? "0%" :
  share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

/** Returns {element, input, set} of a labelled slider; screen readers read the shown value. */
export function slider({ label, min, max, step, value, format = String, onInput }) {
  const id = nextId("slider");
  const output = el("output", { for: id });
  const input = el("input", { id, type: "range", min, max, step });
  const show = () => {
    output.textContent = format(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  const set = (x) => { input.value = x; show(); };
  input.addEventListener("input", () => { show(); onInput(Number(input.value)); });
  set(value);
  return { element: el("div", { class: "slider" }, [el("label", { for: id, text: label }), input, output]), input, set };
}

/** Returns {element, input, setOptions} of a labelled select. Options are [value, text]. */
export function choice({ label, options, value, onChange }) {
  const id = nextId("choice");
  const input = el("select", { id, on: { change: () => onChange(input.value) } });
  const setOptions = (pairs, chosen) => {
    input.replaceChildren(...pairs.map(([v, text]) => el("option", { value: v, text })));
    input.value = chosen;
  };
  setOptions(options, value);
  return { element: el("div", { class: "choice" }, [el("label", { for: id, text: label }), input]), input, setOptions };
}

export const button = (text, onClick, options = {}) =>
  el("button", { type: "button", text, on: { click: onClick }, ...options });

/** Returns a list of bars. A row is {text, share} with optional shown, quiet and mark. */
export function barList(rows, label, { areTokens = true } = {}) {
  const items = rows.map(({ text, share, shown = percent(share), quiet = false, mark = "" }) =>
    el("li", { class: quiet ? "bar quiet" : "bar" }, [
      el("span", { class: areTokens ? "bar-name token" : "bar-name", text }),
      el("span", { class: "bar-track" }, [
        el("span", { class: "bar-fill", style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } }),
      ]),
      el("span", { class: "bar-value", text: shown }),
      mark ? el("span", { class: "bar-mark", text: mark }) : null,
    ]));
  return el("ol", { class: areTokens ? "bars" : "bars named", "aria-label": label }, items);
}

export const card = (title, children, options = {}) =>
  el("section", { class: "card", ...options }, [title ? el("h2", { text: title }) : null, ...children]);

export const note = (text) => el("p", { class: "note", text });

/** Makes the arrow keys move between the buttons of a group, of which one is in the tab order. */
export function rovingKeys(group, columns = () => 1) {
  group.addEventListener("keydown", (event) => {
    const items = [...group.querySelectorAll("button:not([disabled])")];
    const at = items.indexOf(document.activeElement);
    const width = columns();
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width };
    const to = { Home: 0, End: items.length - 1 }[event.key] ?? at + moves[event.key];
    if (at < 0 || !(to >= 0 && to < items.length)) return;
    event.preventDefault();
    items.forEach((item) => (item.tabIndex = -1));
    items[to].tabIndex = 0;
    items[to].focus();
  });
}
