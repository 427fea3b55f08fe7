// A field that finds a token of the vocabulary by its name and returns its id.

import { el, nextId } from "./dom.js";

const MOST_MATCHES = 8;

/**
 * Returns {element, note, input, value, explain}: `value()` is the id of the token that was chosen
 * from the list or, if none was chosen, of the best match, or null. `names[id]` is the name of a
 * token. The element `note` shows `explain(text)` if no token matches the text.
 */
export function tokenField({ label, names, onChoose, explain }) {
  const id = nextId("token"), listId = nextId("matches");
  const keys = names.map(searchKey);
  const list = el("ul", { id: listId, role: "listbox", class: "matches", hidden: true, "aria-label": "matching tokens" });
  const input = el("input", {
    id, type: "text", role: "combobox", autocomplete: "off", spellcheck: "false",
    "aria-expanded": "false", "aria-controls": listId, "aria-autocomplete": "list",
  });
  const field = { input, matches: [], at: -1, chosen: null };
  field.note = el("p", { class: "note field-note", role: "status" });
  field.explain = () => (field.note.textContent = explain(input.value));
  field.value = () => field.chosen ?? field.matches[0] ?? null;
  function close() {
    list.hidden = true;
    field.at = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }
  function open() {
    field.chosen = null;
    field.matches = input.value === "" ? [] : findTokens(names, keys, input.value);
    list.replaceChildren(...field.matches.map((token, i) =>
      el("li", { role: "option", id: `${listId}-${i}`, class: "token", text: names[token] })));
    list.hidden = field.matches.length === 0;
    if (list.hidden && input.value !== "") field.explain();
    else field.note.textContent = "";
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark(-1);
  }
  function mark(at) {
    field.at = at;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    if (at >= 0) input.setAttribute("aria-activedescendant", `${listId}-${at}`);
  }
  function choose(at) {
    field.chosen = field.matches[at];
    input.value = names[field.chosen];
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
      else field.explain();
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

/** Returns tokens whose name is, begins with or contains a text, in this order. */
function findTokens(names, keys, text) {
  const ranked = [[], [], [], []];
  const sought = searchKey(text);
  names.forEach((name, token) => {
    const key = keys[token];
    if (name === text) ranked[0].push(token);
    else if (key === sought) ranked[1].push(token);
    else if (key.startsWith(sought)) ranked[2].push(token);
    else if (key.includes(sought)) ranked[3].push(token);
  });
  return ranked.flat().slice(0, MOST_MATCHES);
}

/** Returns a text in lower case with the signs that names have for spaces, line feeds and tabs. */
function searchKey(text) {
  const signs = { " ": "·", "\n": "⏎", "\t": "→" };
  return text.toLowerCase().replace(/[ \n\t]/g, (c) => signs[c]);
}
