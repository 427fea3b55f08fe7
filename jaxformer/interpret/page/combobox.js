// A field that finds a token of the vocabulary by its text.

import { el, nextId, shownToken } from "./dom.js";

const MOST_MATCHES = 8;

/** Returns {element, input, value}: `value()` is the id of the chosen token, or null. */
export function tokenField({ label, names, onChoose }) {
  const id = nextId("token"), listId = nextId("matches");
  const shown = names.map(shownToken);
  const list = el("ul", { id: listId, role: "listbox", class: "matches", hidden: true, "aria-label": "matching tokens" });
  const input = el("input", {
    id, type: "text", role: "combobox", autocomplete: "off", spellcheck: "false",
    "aria-expanded": "false", "aria-controls": listId, "aria-autocomplete": "list",
  });
  const field = { input, matches: [], at: -1 };
  const typed = () => shownToken(input.value === "" ? " " : input.value);

  field.value = () => {
    const exact = shown.indexOf(input.value === "" ? "" : typed());
    return exact >= 0 ? exact : (field.matches[0] ?? null);
  };
  function close() {
    list.hidden = true;
    field.at = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }
  function open() {
    field.matches = input.value === "" ? [] : findTokens(shown, typed());
    list.replaceChildren(...field.matches.map((token, i) =>
      el("li", { role: "option", id: `${listId}-${i}`, class: "token", text: shown[token] })));
    list.hidden = field.matches.length === 0;
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark(-1);
  }
  function mark(at) {
    field.at = at;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    if (at >= 0) input.setAttribute("aria-activedescendant", `${listId}-${at}`);
  }
  function choose(at) {
    input.value = shown[field.matches[at]];
    close();
  }
  input.addEventListener("input", open);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    const size = field.matches.length;
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (move && !list.hidden) mark((field.at + move + size) % size);
    else if (event.key === "Escape") close();
    else if (event.key === "Enter") {
      if (field.at >= 0) choose(field.at);
      close();
      if (field.value() !== null) onChoose(field.value());
    } else return;
    event.preventDefault();
  });
  list.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // the input keeps the focus
    const at = [...list.children].indexOf(event.target);
    if (at >= 0) choose(at);
  });
  field.element = el("div", { class: "field" }, [el("label", { for: id, text: label }), input, list]);
  return field;
}

/** Returns tokens that are, begin with or contain a text, in this order. */
function findTokens(shown, text) {
  const ranked = [[], [], []];
  const lower = text.toLowerCase();
  for (let token = 0; token < shown.length; token++) {
    if (shown[token] === text) ranked[0].push(token);
    else if (shown[token].toLowerCase().startsWith(lower)) ranked[1].push(token);
    else if (shown[token].toLowerCase().includes(lower)) ranked[2].push(token);
  }
  return ranked.flat().slice(0, MOST_MATCHES);
}
