// The text with its selected token, the prediction there, and the controls that edit it.

import { barList, button, card, el, note, svg } from "./dom.js";
import { tokenField } from "./combobox.js";
import { disableFor, reasonNote } from "./reasons.js";
import { sourceTools } from "./source_tools.js";
import { drawLines, tokenStrip } from "./strip.js";
import { nextTokens, sortedLogits } from "./sampling.js";
import { explainNoMatch, noTextField, textField, TYPED_TEXTS } from "./text_field.js";
import { createTokenizer } from "./tokenizer.js";

const CAPTURED = "This page shows captured values, so the text cannot be edited. For another text, write "
  + "another page: jaxformer explain RUN \"your text\"";

/** Returns {element, update, shade}. */
export function textPanel(store) {
  const { data, values } = store;
  const strip = tokenStrip({ label: data.source ? "Target tokens" : "Tokens", onSelect: (position) => store.select({ position }) });
  const source = data.source && tokenStrip({ label: "Source tokens", onSelect: (position) => sourceEditing?.select(position) });
  const tokenizer = values.live && data.tokenizer ? createTokenizer(data.tokenizer) : null;
  const sourceEditing = source && sourceTools(store, source, tokenizer);
  const typed = tokenizer && textField(store, tokenizer, "text");
  const sourceTyped = tokenizer && source && textField(store, tokenizer, "source");
  const tools = values.live ? editTools(store, tokenizer) : note(CAPTURED);
  const reason = values.live && !tokenizer ? noTextField(data.tokenizer_reason) : null;
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const strips = el("div", { class: "strips" }, [
    lines,
    source && textColumn([el("h3", { text: "Source" }), sourceTyped?.element, source.element, sourceEditing?.element]),
    textColumn([source && el("h3", { text: "Target" }), typed?.element ?? reason, strip.element, tools.element ?? tools]),
  ].filter(Boolean));
  const prediction = el("div", { class: "prediction", "aria-live": "polite" });
  const element = card("Text", [el("div", { class: "split" }, [strips, prediction])]);
  const panel = { element, strip, shaded: null };

  panel.shade = (shaded) => {
    panel.shaded = shaded;
    strip.shade(shaded?.keys === "tokens" ? shaded.weights : null);
    source?.shade(shaded?.keys === "source" ? shaded.weights : null);
    redraw();
  };
  function redraw() {
    const { shaded } = panel;
    if (!shaded) return drawLines(lines, null);
    const from = (shaded.queries === "source" ? source : strip).items[shaded.query];
    drawLines(lines, from, (shaded.keys === "source" ? source : strip).items, shaded.weights);
  }
  panel.update = (what) => {
    if (what === "values" && panel.tokens !== store.tokens) {
      panel.tokens = store.tokens;
      strip.setTokens(store.tokens.map(store.name));
    }
    if (source && panel.source !== store.source) {
      panel.source = store.source;
      source.setTokens(store.source.map(store.name));
    }
    sourceEditing?.update();
    strip.select(store.selection.position);
    if (what === "values" || what === "selection") showPrediction(store, prediction);
    tools.update?.(what);
    typed?.update(what);
    sourceTyped?.update(what);
  };
  strip.element.addEventListener("scroll", redraw);
  new ResizeObserver(redraw).observe(strips);
  return panel;
}

const textColumn = (parts) => el("div", { class: "text-column" }, parts.filter(Boolean));

function showPrediction(store, element) {
  const { values, selection: { position } } = store;
  const best = nextTokens(values.distribution(position), 1, 1).slice(0, 6);
  const changed = values.live && values.run !== values.baseline;
  const before = changed && new Map(
    nextTokens(sortedLogits(values.baselineLogits(position)), 1, 1).map(({ id, share }) => [id, share]));
  const rows = best.map(({ id, share }) => {
    const text = store.name(id);
    if (!before) return { text, share };
    const change = 100 * (share - before.get(id));
    return { text, share, mark: `${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(1)}` };
  });
  const what = store.data.config.bidirectional ? "Prediction at" : "Prediction after";
  const title = `${what} token ${position}, ${store.name(store.tokens[position])}`;
  element.replaceChildren(
    el("h3", { class: "token-title", text: title }),
    barList(rows, title),
    changed ? note("Right column: change in percentage points, compared with all heads at strength 1.") : "",
  );
}

/** Returns the field and the buttons that replace, insert and delete tokens. */
function editTools(store, tokenizer) {
  const edit = (change, move) => store.edit((tokens, position) => {
    change(tokens, position);
    return { tokens, first: position, select: position + move };
  });
  const replace = (id) => edit((tokens, at) => (tokens[at] = id), 0);
  const names = store.data.names.slice(0, store.data.config.vocab_size);
  const explain = (text) => explainNoMatch(text, names, tokenizer, TYPED_TEXTS.text.label(store));
  const field = tokenField({ label: store.source ? "Other target token" : "Other token", names, onChoose: replace, explain });
  const withToken = (action) => () => {
    const id = field.value();
    if (id === null) field.explain();
    else action(id);
  };
  const insert = (id) => edit((tokens, at) => tokens.splice(at + 1, 0, id), 1);
  const buttons = [
    button("Replace", withToken(replace)),
    button("Insert after", withToken(insert)),
    button("Delete", () => edit((tokens, at) => tokens.splice(at, 1), -1)),
    button(store.source ? "Reset target" : "Reset text", () => store.setTokens(store.data.tokens, 0, store.data.tokens.length - 1)),
  ];
  const [, insertButton, deleteButton] = buttons;
  const reasons = reasonNote(buttons);
  const update = () => {
    const { length } = store.tokens, most = store.data.config.max_length;
    disableFor(deleteButton, length < 2 ? "the text needs a token." : null);
    disableFor(insertButton, length >= most ? `the text is full: it has ${length} tokens, and this model takes at most ${most}.` : null);
    reasons.update();
  };
  const row = el("div", { class: "tools" }, [field.element, el("div", { class: "buttons" }, buttons), field.note]);
  return { element: el("div", {}, [row, reasons.element]), update };
}
