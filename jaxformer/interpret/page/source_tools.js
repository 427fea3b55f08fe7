// The source of an encoder–decoder in a live page: one selected token, and buttons that edit it.

import { tokenField } from "./combobox.js";
import { button, el } from "./dom.js";

/** Returns {element, select, update}; `strip` shows the source tokens. */
export function sourceTools(store, strip) {
  const { data, values } = store;
  if (!values.live || !store.source) return null;
  const tools = { position: 0 };
  const edit = (change, move) => store.edit((tokens, _, source) => {
    const at = Math.min(tools.position, source.length - 1);
    change(source, at);
    tools.position = Math.max(0, Math.min(at + move, source.length - 1));
    return { tokens, source };
  });
  const replace = (id) => edit((source, at) => (source[at] = id), 0);
  const names = data.names.slice(0, data.config.source_vocab_size);
  const field = tokenField({ label: "Other source token", names, onChoose: replace });
  const withToken = (action) => () => { const id = field.value(); if (id !== null) action(id); };
  const insert = (id) => edit((source, at) => source.splice(at + 1, 0, id), 1);
  const buttons = [
    button("Replace", withToken(replace)),
    button("Insert after", withToken(insert)),
    button("Delete", () => edit((source, at) => source.splice(at, 1), -1)),
    button("Reset source", () => store.edit((tokens) => ({ tokens, source: data.source }))),
  ];
  const [, insertButton, deleteButton] = buttons;
  tools.select = (position) => {
    tools.position = position;
    strip.select(position);
  };
  tools.update = () => {
    const { length } = store.source, most = data.config.max_source_length;
    setDisabled(deleteButton, length < 2, "The source needs at least one token.");
    setDisabled(insertButton, length >= most, `This model reads at most ${most} source tokens.`);
    strip.select(Math.min(tools.position, length - 1));
  };
  tools.element = el("div", { class: "tools", role: "group", "aria-label": "Edit the source" }, [
    field.element, el("div", { class: "buttons" }, buttons),
  ]);
  return tools;
}

/** Disables a button and says why. */
export function setDisabled(item, isDisabled, reason) {
  item.disabled = isDisabled;
  if (isDisabled) item.setAttribute("title", reason);
  else item.removeAttribute("title");
}
