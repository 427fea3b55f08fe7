// The model's tokenizer, which returns the same ids as the tokenizer in Python.

import { addedTokenFinder } from "./added_tokens.js";
import { unpackTexts } from "./arrays.js";
import { bytePairModel } from "./byte_pairs.js";
import { tokenDecoder } from "./token_decoder.js";
import { textNormalizer, wordSplitter } from "./tokenizer_steps.js";
import { unigramModel, wordLevelModel, wordPieceModel } from "./word_models.js";

const TOKENIZER_MODELS = { BPE: bytePairModel, Unigram: unigramModel, WordPiece: wordPieceModel, WordLevel: wordLevelModel };
const MOST_WORDS = 20_000; // words whose ids are kept
const LONGEST_KEPT = 100; // characters

/** Returns {encode, decode}. `encode(text)` does not add the ids before and after a text. */
export function createTokenizer(data) {
  const tokens = unpackTexts(data.model.vocabulary.data);
  const ids = new Map(tokens.map((token, id) => [token, id]).filter(([token]) => token));
  const encodeWord = keepWords(TOKENIZER_MODELS[data.model.type](data.model, tokens, ids));
  const [raw, normalized] = [false, true].map((isNormalized) => addedTokenFinder(
    data.added.filter((token) => token.normalized === isNormalized), data.parses_special, data.word));
  const normalize = textNormalizer(data.normalizer), split = wordSplitter(data.pre_tokenizer);
  const unlessToken = (piece, change) => ("id" in piece ? [piece] : change(piece));

  const encodePlain = (text) => raw({ text, first: true })
    .flatMap((piece) => unlessToken(piece, ({ text, first }) => normalized({ text: normalize(text), first })))
    .flatMap((piece) => unlessToken(piece, split))
    .flatMap((piece) => ("id" in piece ? [piece.id] : encodeWord(piece.text)));

  const added = new Map(data.added.map((token) => [token.id, token]));
  const decodeTokens = tokenDecoder(data.decoder);
  const decode = (list) => decodeTokens(list
    .filter((id) => !added.get(id)?.special && (added.has(id) || tokens[id]))
    .map((id) => ({ text: added.get(id)?.text ?? tokens[id], isAdded: added.has(id) })));
  return { encode: data.parses_special ? encodePlain : spellingOut(data, added, tokens, encodePlain), decode };
}

/** Returns `encodeWord` with a cache of the ids of short words. */
function keepWords(encodeWord) {
  const known = new Map();
  return (word) => {
    if (word.length > LONGEST_KEPT) return encodeWord(word);
    if (known.size >= MOST_WORDS) known.clear();
    if (!known.has(word)) known.set(word, encodeWord(word));
    return known.get(word);
  };
}

/**
 * Returns a function that encodes special tokens in a text as plain text. Merges can build a special
 * token from plain text. As in Python, it is then replaced by the tokens of its bytes (`spellings`),
 * or the text is split after the first character of the special token (`special`).
 */
function spellingOut({ spellings, special }, added, tokens, encode) {
  if (spellings) return (text) => encode(text).flatMap((id) => spellings[id] ?? id);
  const isSpecial = new Set(special);
  const names = special.map((id) => added.get(id)?.text ?? tokens[id]);
  return (text) => {
    const ids = encode(text);
    if (!ids.some((id) => isSpecial.has(id))) return ids;
    return splitWithin(text, names).flatMap((part) => encode(part)).filter((id) => !isSpecial.has(id));
  };
}

/** Splits a text after the first character of each occurrence of a name. */
function splitWithin(text, names) {
  const cuts = new Set();
  for (const name of names) {
    const first = String.fromCodePoint(name.codePointAt(0) ?? 0).length;
    if (name.length <= first) continue;
    for (let at = text.indexOf(name); at >= 0; at = text.indexOf(name, at + 1)) cuts.add(at + first);
  }
  const places = [0, ...[...cuts].sort((a, b) => a - b), text.length];
  return places.slice(1).map((end, i) => text.slice(places[i], end)).filter(Boolean);
}
