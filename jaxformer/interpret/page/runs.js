// The passes of a live model: over a new text, and over the same text with other strengths of heads.

/**
 * Adds `begin` and `beginAgain`, which compute `values.baseline` and `values.run` in small steps.
 *
 * `compute(tokens, known, source)` computes a text with all heads at strength 1. `known` is null or
 * {run, position}: the last run of `compute` and the first token that differs from it.
 * `ablate(baseline, strengths)` computes the text of `baseline` with other strengths, at least one of
 * which is not 1. `forget` is called after each pass.
 */
export function addRuns(values, { compute, ablate, forget }) {
  /** Computes new tokens or a new source; `position` is the first token that differs. */
  values.begin = function* (tokens, position, source) {
    const known = values.baseline && { run: values.baseline, position };
    const baseline = yield* compute(tokens, known, source);
    const run = yield* ablated(baseline);
    Object.assign(values, { baseline, run });
    forget();
  };
  /** Computes the same tokens with the current strengths of the heads. */
  values.beginAgain = function* () {
    values.run = yield* ablated(values.baseline);
    forget();
  };
  function* ablated(baseline) {
    const strengths = values.strengths.slice();
    return changedStrength(strengths) < 0 ? baseline : yield* ablate(baseline, strengths);
  }
}

/** Returns the index of the first strength that is not 1, or −1. */
export const changedStrength = (strengths) => strengths.findIndex((strength) => strength !== 1);

/** Returns `known` if the last run of the encoder–decoder has the same source; null otherwise. */
export const knownForSource = (known, source) =>
  known && String(known.run.encoded.tokens) === String(source) ? known : null;
