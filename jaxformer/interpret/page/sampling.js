// The distribution of the next token after temperature, top-k and top-p, as `decoding/sampling.py`.

import { largestIndices, logSum } from "./maths.js";

/**
 * Returns the most probable tokens as [{id, share, kept}], the most probable first.
 *
 * `known` is {ids, logits, logSum}: all logits or the largest ones, the largest first, and the
 * log-sum-exp of all logits. Top-k keeps this number of tokens, or all tokens if it is 0. Of these,
 * top-p keeps the fewest tokens that have at least this total probability.
 */
export function nextTokens(known, temperature, topP, topK = 0) {
  const { ids, logits } = known;
  if (temperature === 0) {
    return Array.from(ids, (id, i) => ({ id, share: i === 0 ? 1 : 0, kept: i === 0 }));
  }
  const tempered = Float64Array.from(logits, (logit) => (logit - logits[0]) / temperature);
  const total = tailLogSum(known, tempered, temperature);
  const shares = tempered.map((logit) => Math.exp(logit - total));
  const limit = topK > 0 ? Math.min(topK, ids.length) : ids.length;
  const truncates = limit < (known.vocabSize ?? ids.length) && topK > 0;
  const mass = truncates ? shares.subarray(0, limit).reduce((sum, share) => sum + share, 0) : 1;
  let before = 0;
  const found = Array.from(ids, (id, i) => {
    const kept = i < limit && before < topP * mass;
    before += shares[i];
    return { id, share: shares[i], kept };
  });
  const kept = found.reduce((sum, token) => sum + (token.kept ? token.share : 0), 0);
  const whole = topP < 1 || truncates ? kept : 1;
  for (const token of found) token.share = token.kept ? token.share / whole : 0;
  return found;
}

/**
 * Returns the logarithm of the mass of all tokens at this temperature.
 *
 * For tokens outside of `known`, only their total mass at temperature 1 is stored. Their logits are
 * assumed to be equal, so the result is exact only if `known` contains all tokens.
 */
function tailLogSum(known, tempered, temperature) {
  const inside = logSum(tempered);
  const missing = (known.vocabSize ?? known.ids.length) - known.ids.length;
  if (missing <= 0) return inside;
  const mass = Math.exp(known.logSum - known.logits[0]) - Math.exp(logSum(known.logits) - known.logits[0]);
  if (mass <= 0) return inside;
  const each = Math.log(mass / missing) / temperature;
  return logSum(Float64Array.of(inside, each + Math.log(missing)));
}

/** Returns all logits in descending order, as `nextTokens` takes them. */
export function sortedLogits(logits) {
  const ids = Int32Array.from(logits, (_, i) => i).sort((a, b) => logits[b] - logits[a] || a - b);
  return { ids, logits: Float32Array.from(ids, (id) => logits[id]), logSum: logSum(logits) };
}

/** Draws a token; `random` is a number in [0, 1). */
export function drawToken(tokens, random) {
  let sum = 0;
  for (const { id, share } of tokens) {
    sum += share;
    if (random < sum) return id;
  }
  return tokens[0].id;
}

/** Returns [{id, share}] of the most probable tokens. */
export function topShares(logits, num) {
  const total = logSum(logits);
  return largestIndices(logits, num).map((id) => ({ id, share: Math.exp(logits[id] - total) }));
}
