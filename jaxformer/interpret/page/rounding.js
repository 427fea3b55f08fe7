// Notes about 8-bit weights: what the rounding changes, and how long the first pass took.

import { el } from "./dom.js";

/** Returns the note, or null for a page whose weights are not rounded to 8 bits. */
export function roundingNote(store) {
  const { rounding, mode } = store.data;
  if (mode !== "live" || !rounding) return null;
  const { difference, spread, same, tokens } = rounding;
  const text = "The page stores each matrix in 8 bits. For the original text, rounding changes the logits by at most " +
    `${difference.toPrecision(2)} (their standard deviation is ${spread.toPrecision(2)}), and the most probable token is ` +
    `the same at ${same} of ${tokens} positions.`;
  const time = el("span", { id: "first-pass" });
  const begin = performance.now();
  let isFirst = true;
  store.subscribe((what) => {
    if (what !== "values" || !isFirst) return;
    isFirst = false;
    time.textContent = ` The first pass took ${((performance.now() - begin) / 1000).toFixed(1)} s in this browser.`;
  });
  return el("p", { class: "note", id: "rounding" }, [text, time]);
}
