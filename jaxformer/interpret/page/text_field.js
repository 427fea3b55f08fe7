// The field for a text of the reader's own, which the model then reads.

import { button, el, nextId, note } from "./dom.js";

const MOST_CHARACTERS = 20_000; // a longer text would make typing slow
const EMPTY = "Type at least one character.";

/** The texts that a reader can type, with functions that read and write their tokens in the store. */
export const TYPED_TEXTS = {
  text: {
    label: (store) => (store.source ? "Your target text" : "Your text"), action: (store) => (store.source ? "Run this target" : "Run this text"),
    tokens: (store) => store.tokens, run: (store, tokens) => store.setTokens(tokens, 0, tokens.length - 1),
  },
  source: {
    label: () => "Your source text", action: () => "Run this source",
    tokens: (store) => store.source, run: (store, source) => store.edit((tokens) => ({ tokens, source })),
  },
};

/** Returns {element, update} of the field for a text of TYPED_TEXTS; `tokenizer` is from tokenizer.js. */
export function textField(store, tokenizer, name) {
  const { label, action, tokens: tokensOf, run: runTokens } = TYPED_TEXTS[name];
  const id = nextId("text"), statusId = nextId("text-status");
  const input = el("textarea", {
    id, rows: 2, spellcheck: "false", autocapitalize: "off", autocomplete: "off",
    "aria-describedby": statusId, "aria-keyshortcuts": "Control+Enter",
  });
  const status = el("p", { class: "note text-status", id: statusId, role: "status" });
  const run = button(action(store), () => runText());
  let shown = tokensOf(store); // the tokens that belong to the text in the field
  const read = () => readText(store.data.tokenizer[name], store.data.names, tokenizer, input.value);

  function runText() {
    const { tokens, fault } = read();
    if (fault) return;
    shown = tokens;
    runTokens(store, tokens);
  }
  function showStatus({ tokens, fault, said }, isExact = true) {
    const without = "The tokens shown have no exact text. Running this text gives";
    status.textContent = fault ?? (isExact ? said : `${without} ${countTokens(tokens.length)}.`);
    status.classList.toggle("bad", Boolean(fault));
    run.disabled = Boolean(fault);
    run.title = fault ?? "Ctrl+Enter";
  }
  function follow(tokens) {
    shown = tokens;
    input.value = tokenizer.decode(tokens);
    const found = read();
    showStatus(found, !found.fault && sameTokens(found.tokens, tokens));
  }
  input.addEventListener("input", () => showStatus(read()));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    runText();
  });
  follow(shown);
  const update = (what) => {
    if (what === "values" && !sameTokens(tokensOf(store), shown)) follow(tokensOf(store));
  };
  return {
    element: el("div", { class: "text-field" }, [
      el("label", { for: id, text: label(store) }), input,
      el("div", { class: "text-run" }, [run, status]),
    ]),
    update,
  };
}

/** Returns a sentence instead of the field for a page that cannot encode texts. */
export const noTextField = (reason) => note(`This page cannot read a text that you type: ${reason}.`);

/** Returns {tokens, said} of a text, or {fault}: why the model cannot read it. */
function readText(about, names, tokenizer, text) {
  if (text === "") return { fault: EMPTY };
  if (text.length > MOST_CHARACTERS) {
    return { fault: `${grouped(text.length)} characters; this page reads at most ${grouped(MOST_CHARACTERS)}.` };
  }
  if (!text.isWellFormed()) return { fault: "The text contains half of a character, which has no UTF-8 bytes." };
  const inner = tokenizer.encode(text);
  const tokens = [...about.before, ...inner, ...about.after];
  const missing = tokens.find((token) => token >= about.num_ids);
  if (missing !== undefined) {
    const missingText = tokenizer.decode([missing]);
    return { fault: `The text contains token ${missing}, “${missingText}”; this model's tokens are 0 to ${about.num_ids - 1}.` };
  }
  if (!tokens.length) return { fault: "The tokenizer removes all characters of this text. Type another text." };
  const reader = about.limited_by_page ? "this page" : "this model";
  const count = countTokens(tokens.length), most = `${reader} takes at most ${about.most_tokens}`;
  if (tokens.length > about.most_tokens) return { fault: `${count}; ${most}.` };
  return { tokens, said: `${count}${addedTokens(about, names)}; ${most}.` };
}

/** Returns the part of a sentence that names the tokens around the text. */
function addedTokens({ before, after }, names) {
  const listed = (ids) => ids.map((id) => names[id]).join(" ");
  const parts = [[before, "before"], [after, "after"]].filter(([ids]) => ids.length);
  return parts.length ? ` with ${parts.map(([ids, where]) => `${listed(ids)} ${where} the text`).join(" and ")}` : "";
}

/**
 * Returns a message: the text is not a token, and the tokenizer splits it into these tokens. `label`
 * is the label of the field for whole texts.
 */
export function explainNoMatch(text, names, tokenizer, label) {
  if (text === "") return "Type the text of a token first.";
  const begin = `No token of the vocabulary contains “${text}”.`;
  const ids = tokenizer && text.length <= MOST_CHARACTERS && text.isWellFormed() ? tokenizer.encode(text) : [];
  if (!ids.length) return begin;
  const listed = ids.slice(0, 8).map((id) => names[id] ?? `#${id}`).join(" | ");
  return `${begin} The tokenizer reads it as ${countTokens(ids.length)}: ${listed}${ids.length > 8 ? " …" : ""}. `
    + `To use the whole text, type it under “${label}”.`;
}

const grouped = (number) => number.toLocaleString("en");
const countTokens = (number) => `${grouped(number)} token${number === 1 ? "" : "s"}`;
const sameTokens = (a, b) => a.length === b.length && a.every((token, i) => token === b[i]);
