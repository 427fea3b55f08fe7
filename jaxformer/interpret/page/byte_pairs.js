// Byte-pair encoding (BPE): merges the pair of tokens that was learned first, again and again.

const utf8Bytes = new TextEncoder();

/** Returns a function from a word to its token ids. `tokens` are the tokens by id. */
export function bytePairModel({ merges, unk_id: unknown, ...model }, tokens, ids) {
  const prefix = model.continuing_subword_prefix ?? "", suffix = model.end_of_word_suffix ?? "";
  const num = tokens.length, size = merges.shape[1];
  const ranks = new Map(), merged = new Int32Array(size);
  for (let rank = 0; rank < size; rank++) {
    const left = merges.data[rank], right = merges.data[size + rank];
    ranks.set(left * num + right, rank);
    merged[rank] = ids.get(tokens[left] + tokens[right].slice(prefix.length));
  }
  const start = (word) => firstTokens(word, { ...model, ids, unknown, prefix, suffix });
  return (word) => {
    if (model.ignore_merges && ids.has(word)) return [ids.get(word)];
    return mergePairs(start(word), ranks, merged, num);
  };
}

/** Returns the ids of the characters of a word, before any merge. */
function firstTokens(word, { ids, unknown, prefix, suffix, byte_fallback: usesBytes, fuse_unk: fuses }) {
  const found = [], characters = Array.from(word);
  let isUnknown = false;
  const addUnknown = () => { if (isUnknown) found.push(unknown); isUnknown = false; };
  characters.forEach((character, i) => {
    const name = (i > 0 ? prefix : "") + character + (i === characters.length - 1 ? suffix : "");
    const id = ids.get(name);
    if (id !== undefined) {
      addUnknown();
      found.push(id);
      return;
    }
    const bytes = usesBytes ? byteTokens(name, ids) : null;
    if (bytes) found.push(...bytes);
    else if (unknown !== null) {
      if (!fuses) addUnknown();
      isUnknown = true;
    }
  });
  addUnknown();
  return found;
}

/** Returns the ids of the tokens <0x…> of a text's bytes; null if one of the tokens is missing. */
export function byteTokens(text, ids) {
  const found = Array.from(utf8Bytes.encode(text), (byte) =>
    ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`));
  return found.includes(undefined) ? null : found;
}

/**
 * Merges pairs in the order of their ranks, from left to right.
 *
 * A linked list holds the tokens, and a heap holds the pairs that can be merged. The time is
 * therefore about proportional to the length of the word.
 */
function mergePairs(symbols, ranks, merged, num) {
  const length = symbols.length;
  const next = symbols.map((_, i) => i + 1), before = symbols.map((_, i) => i - 1);
  const heap = [];
  const add = (at) => {
    const after = next[at];
    if (at < 0 || after >= length) return;
    const rank = ranks.get(symbols[at] * num + symbols[after]);
    if (rank !== undefined) pushKey(heap, rank * length + at);
  };
  for (let at = 0; at + 1 < length; at++) add(at);
  while (heap.length) {
    const key = popKey(heap);
    const at = key % length, id = merged[Math.floor(key / length)];
    const right = next[at];
    if (symbols[at] < 0 || right >= length) continue;
    const rank = ranks.get(symbols[at] * num + symbols[right]);
    // A merge nearby may have replaced the pair since it was pushed.
    if (rank === undefined || merged[rank] !== id) continue;
    symbols[at] = id;
    symbols[right] = -1;
    next[at] = next[right];
    if (next[at] < length) before[next[at]] = at;
    add(before[at]);
    add(at);
  }
  return symbols.filter((id) => id >= 0);
}

/** Adds a number to a binary heap. */
function pushKey(heap, key) {
  let at = heap.length;
  for (let up; at > 0 && heap[(up = (at - 1) >> 1)] > key; at = up) heap[at] = heap[up];
  heap[at] = key;
}

/** Removes and returns the smallest number of a binary heap. */
function popKey(heap) {
  const smallest = heap[0], key = heap.pop();
  const { length } = heap;
  let at = 0;
  for (let down; length && (down = 2 * at + 1) < length; at = down) {
    if (down + 1 < length && heap[down + 1] < heap[down]) down++;
    if (heap[down] >= key) break;
    heap[at] = heap[down];
  }
  if (length) heap[at] = key;
  return smallest;
}
