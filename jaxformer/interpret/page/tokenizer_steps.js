// The steps before the tokenizer's model: normalization, and splitting of a text into words.

import { characterReplacer } from "./characters.js";

const BYTE_CHARACTERS = byteCharacters();
const utf8 = new TextEncoder();

/** Returns the 256 visible characters that represent the bytes 0 to 255, as in GPT-2's vocabulary. */
export function byteCharacters() {
  let next = 256;
  const isShown = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isShown(byte) ? byte : next++));
}

/** Returns a function that normalizes a text. */
export function textNormalizer(steps) {
  const run = steps.map(pieceStep);
  return (text) => run.reduce((text, step) => step({ text, first: true })[0].text, text);
}

/**
 * Returns a function that splits a piece {text, first} into words. `first` is true for the piece
 * that begins where the whole text begins.
 */
export function wordSplitter(steps) {
  const run = steps.map(pieceStep);
  return (piece) => run.reduce((pieces, step) => pieces.flatMap(step).filter(({ text }) => text), [piece]);
}

/** Returns a function that replaces a piece by a list of pieces. */
function pieceStep(step) {
  const pattern = step.pattern === undefined ? null : new RegExp(step.pattern, "gu");
  const change = {
    characters: step.type === "characters" && characterReplacer(step),
    form: (text) => text.normalize(step.form),
    lower: (text) => Array.from(text, (c) => c.toLowerCase()).join(""),
    replace: (text) => text.replace(pattern, step.content),
    prepend: (text, first) => prependText(text, first, step),
    bytes: (text) => Array.from(utf8.encode(text), (byte) => BYTE_CHARACTERS[byte]).join(""),
  }[step.type];
  if (change) return ({ text, first }) => [{ text: change(text, first), first }];
  return (piece) => splitPiece(piece, pattern, step);
}

function prependText(text, first, { text: prefix, once, only_first: onlyFirst }) {
  if (text === "" || (onlyFirst && !first) || (once && text.startsWith(prefix))) return text;
  return prefix + text;
}

/** Splits a piece at the matches of a pattern, as the `tokenizers` library does. */
function splitPiece({ text, first }, pattern, { behavior, invert }) {
  const kept = SPLITS[behavior](matchRanges(text, pattern, invert));
  return kept.map(({ start, end }) => ({ text: text.slice(start, end), first: first && start === 0 }));
}

/** Returns ranges {start, end, matches} that cover a text. */
function matchRanges(text, pattern, invert) {
  const ranges = [];
  let last = 0;
  const add = (start, end, matches) => ranges.push({ start, end, matches: matches !== invert });
  for (const { 0: found, index } of text.matchAll(pattern)) {
    if (index > last) add(last, index, false);
    last = index + found.length;
    add(index, last, true);
  }
  if (last < text.length) add(last, text.length, false);
  return ranges;
}

const SPLITS = {
  Isolated: (ranges) => ranges,
  Removed: (ranges) => ranges.filter(({ matches }) => !matches),
  Contiguous: (ranges) => joinRanges(ranges, (last, { matches }) => last.matches === matches),
  MergedWithPrevious: (ranges) => joinRanges(ranges, (last, { matches }) => matches && !last.matches),
  MergedWithNext: (ranges) => joinRanges(ranges, (last, { matches }) => last.matches && !matches),
};

/** Joins each range with the range before it if `joins(rangeBefore, range)`. */
function joinRanges(ranges, joins) {
  const joined = [];
  ranges.forEach((range, i) => {
    if (i > 0 && joins(ranges[i - 1], range)) joined.at(-1).end = range.end;
    else joined.push({ ...range });
  });
  return joined;
}
