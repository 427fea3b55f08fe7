// Replaces characters like the normalizer `Precompiled` of the `tokenizers` library, which T5 uses.

import { unpackTexts } from "./arrays.js";

// The library looks up a cluster of this number of bytes or more only by its characters.
const LONGEST_CLUSTER = 6;
const clusters = new Intl.Segmenter("und", { granularity: "grapheme" });
const clusterBytes = new TextEncoder();

/** Returns a function that replaces the texts `from` by the texts `to`. */
export function characterReplacer({ from, to }) {
  const found = unpackTexts(to.data);
  const replacements = new Map(unpackTexts(from.data).map((text, i) => [text, found[i]]));
  const replace = ({ segment }) => {
    const isShort = clusterBytes.encode(segment).length < LONGEST_CLUSTER;
    return (isShort ? ofPrefix(segment, replacements) : null)
      ?? Array.from(segment, (character) => replacements.get(character) ?? character).join("");
  };
  return (text) => Array.from(clusters.segment(text), replace).join("");
}

/** Returns the replacement of a prefix, or null. No text in `from` is a prefix of another one. */
function ofPrefix(cluster, replacements) {
  let prefix = "";
  for (const character of cluster) {
    prefix += character;
    if (replacements.has(prefix)) return replacements.get(prefix);
  }
  return null;
}
