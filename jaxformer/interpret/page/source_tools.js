// The source of an encoder–decoder in a live page: one selected token, and buttons that edit it.

import { tokenField } from "./combobox.js";
import { button, el } from "./dom.js";
import { disableFor, reasonNote } from "./reasons.js";
import { explainNoMatch, TYPED_TEXTS } from "./text_field.js";

/** Returns {element, select, update}; `strip` shows the source tokens. */
export function sourceTools(store, strip, tokenizer) {
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
  const explain = (text) => explainNoMatch(text, names, tokenizer, TYPED_TEXTS.source.label());
  const field = tokenField({ label: "Other source token", names, onChoose: replace, explain });
  const withToken = (action) => () => {
    const id = field.value();
    if (id === null) field.explain();
    else action(id);
  };
  const insert = (id) => edit((source, at) => source.splice(at + 1, 0, id), 1);
  const buttons = [
    button("Replace", withToken(replace)),
    button("Insert after", withToken(insert)),
    button("Delete", () => edit((source, at) => source.splice(at, 1), -1)),
    button("Reset source", () => store.edit((tokens) => ({ tokens, source: data.source }))),
  ];
  const [, insertButton, deleteButton] = buttons;
  const reasons = reasonNote(buttons);
  tools.select = (position) => {
    tools.position = position;
    strip.select(position);
  };
  tools.update = () => {
    const { length } = store.source, most = data.config.max_source_length;
    disableFor(deleteButton, length < 2 ? "the source needs at least one token." : null);
    disableFor(insertButton, length >= most ? `the source is full: it has ${length} tokens, and this model takes at most ${most}.` : null);
    reasons.update();
    strip.select(Math.min(tools.position, length - 1));
  };
  tools.element = el("div", { class: "tools", role: "group", "aria-label": "Edit the source" }, [
    field.element, el("div", { class: "buttons" }, buttons), field.note, reasons.element,
  ]);
  return tools;
}
