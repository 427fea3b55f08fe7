// Tokenizer models without merges: Unigram, WordPiece and WordLevel.

import { byteTokens } from "./byte_pairs.js";

const UNKNOWN_PENALTY = 10; // how much less probable an unknown character is than any token

/** Returns a function from a text to the ids of its most probable tokens (Viterbi's algorithm). */
export function unigramModel({ scores, unk_id: unknown, byte_fallback: usesBytes }, tokens, ids) {
  const scoreOf = new Float64Array(scores.data.buffer);
  const longest = tokens.reduce((most, token) => Math.max(most, token.length), 0);
  const unknownScore = scoreOf.reduce((least, score) => Math.min(least, score), Infinity) - UNKNOWN_PENALTY;
  return (text) => {
    const starts = bestStarts(text, { ids, scoreOf, longest, unknown, unknownScore });
    return bestPieces(text, starts, unknown).flatMap((piece) =>
      ids.get(piece) ?? (usesBytes ? byteTokens(piece, ids) : null) ?? unknown);
  };
}

/** Returns, for each position, the start and the id of the best last token that ends there. */
function bestStarts(text, { ids, scoreOf, longest, unknown, unknownScore }) {
  const size = text.length;
  const best = { score: new Float64Array(size + 1), start: new Int32Array(size + 1).fill(-1), id: new Int32Array(size + 1) };
  const offer = (start, end, id, score) => {
    const total = best.score[start] + score;
    if (best.start[end] >= 0 && total <= best.score[end]) return;
    best.score[end] = total;
    best.start[end] = start;
    best.id[end] = id;
  };
  for (let start = 0; start < size;) {
    const next = start + (text.codePointAt(start) > 0xffff ? 2 : 1);
    let hasCharacter = false;
    for (let end = next; end <= size && end - start <= longest; end++) {
      const id = ids.get(text.slice(start, end));
      if (id === undefined) continue;
      offer(start, end, id, scoreOf[id]);
      hasCharacter ||= end === next;
    }
    if (!hasCharacter) offer(start, next, unknown, unknownScore);
    start = next;
  }
  return best;
}

/** Returns the texts of the best tokens; unknown characters side by side are one text. */
function bestPieces(text, best, unknown) {
  const pieces = [];
  let wasUnknown = false;
  for (let end = text.length; end > 0; end = best.start[end]) {
    const piece = text.slice(best.start[end], end), isUnknown = best.id[end] === unknown;
    if (isUnknown && wasUnknown) pieces.push(piece + pieces.pop());
    else pieces.push(piece);
    wasUnknown = isUnknown;
  }
  return pieces.reverse();
}

/** Returns a function from a word to ids: each token is the longest prefix of the rest. */
export function wordPieceModel(model, _, ids) {
  const { unk_id: unknown, continuing_subword_prefix: prefix, max_input_chars_per_word: most } = model;
  return (word) => {
    const characters = Array.from(word), found = [];
    if (characters.length > most) return [unknown];
    for (let start = 0; start < characters.length;) {
      let end = characters.length, id;
      for (; end > start && id === undefined; end--) {
        id = ids.get((start > 0 ? prefix : "") + characters.slice(start, end).join(""));
      }
      if (id === undefined) return [unknown];
      found.push(id);
      start = end + 1;
    }
    return found;
  };
}

/** Returns a function from a word to the id of the word. */
export const wordLevelModel = ({ unk_id: unknown }, _, ids) => (word) => [ids.get(word) ?? unknown];
