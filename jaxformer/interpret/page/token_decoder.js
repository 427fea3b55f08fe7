// Turns token ids back into a text.

import { byteCharacters } from "./tokenizer_steps.js";

const BYTE_OF = new Map(byteCharacters().map((character, byte) => [character, byte]));
const textBytes = new TextEncoder();
const lenient = new TextDecoder("utf-8", { ignoreBOM: true });
const strict = new TextDecoder("utf-8", { ignoreBOM: true, fatal: true });

/** Returns a function from tokens {text, isAdded} to a text. */
export function tokenDecoder(steps) {
  if (steps.length === 0) return (tokens) => tokens.map(({ text }) => text).join(" ");
  if (steps[0].type === "ByteLevel") return (tokens) => decodeBytes(tokens, steps[0].added_as_text);
  return (tokens) => steps.reduce((texts, step) => DECODERS[step.type](texts, step), tokens.map(({ text }) => text)).join("");
}

/** Joins tokens whose characters represent bytes. Invalid UTF-8 becomes U+FFFD. */
function decodeBytes(tokens, addedAsText) {
  const bytes = tokens.flatMap(({ text, isAdded }) => {
    const found = isAdded && addedAsText ? [undefined] : Array.from(text, (c) => BYTE_OF.get(c));
    return found.includes(undefined) ? [...textBytes.encode(text)] : found;
  });
  return lenient.decode(Uint8Array.from(bytes));
}

const DECODERS = {
  Replace: (texts, { pattern, content }) => texts.map((text) => text.replaceAll(pattern.String, () => content)),
  Fuse: (texts) => [texts.join("")],
  ByteFallback: joinByteTokens,
  Strip: (texts, { content, start, stop }) => texts.map((text) => stripText(text, content, start, stop)),
  Metaspace: (texts, { replacement, prepend_scheme: scheme }) => texts.map((text, i) =>
    text.replaceAll(replacement, i === 0 && scheme !== "never" ? "" : " ")),
  WordPiece: (texts, { prefix, cleanup }) => texts.map((text, i) => {
    const joined = i === 0 ? text : text.startsWith(prefix) ? text.slice(prefix.length) : ` ${text}`;
    return cleanup ? CLEANUP.reduce((x, [from, to]) => x.replaceAll(from, to), joined) : joined;
  }),
  BPEDecoder: (texts, { suffix }) => texts.map((text, i) =>
    text.replaceAll(suffix, i === texts.length - 1 ? "" : " ")),
};
const CLEANUP = [
  [" .", "."], [" ?", "?"], [" !", "!"], [" ,", ","], [" ' ", "'"], [" n't", "n't"], [" 'm", "'m"],
  [" do not", " don't"], [" 's", "'s"], [" 've", "'ve"], [" 're", "'re"],
];

/** Joins tokens such as <0xE4> to characters. If their bytes are invalid, each becomes U+FFFD. */
function joinByteTokens(texts) {
  const joined = [];
  let bytes = [];
  const flush = () => {
    if (!bytes.length) return;
    try {
      joined.push(strict.decode(Uint8Array.from(bytes)));
    } catch {
      joined.push(...bytes.map(() => "\ufffd"));
    }
    bytes = [];
  };
  for (const text of texts) {
    const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(text);
    if (byte) bytes.push(parseInt(byte[1], 16));
    else {
      flush();
      joined.push(text);
    }
  }
  flush();
  return joined;
}

/** Removes `content` at most `start` times at the start of a text, and `stop` times at its end. */
function stripText(text, content, start, stop) {
  for (let i = 0; i < start && text.startsWith(content); i++) text = text.slice(content.length);
  for (let i = 0; i < stop && text.endsWith(content); i++) text = text.slice(0, -content.length);
  return text;
}
