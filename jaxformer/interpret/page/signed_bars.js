// Bars of numbers that may be negative.

import { el } from "./dom.js";
import { shownNumber } from "./formula.js";

/** Returns bars to the left for negative values and to the right for positive ones. */
export function signedBars(rows, label) {
  const most = rows.reduce((m, { value }) => Math.max(m, Math.abs(value)), 0) || 1;
  const items = rows.map(({ text, value }) => el("li", { class: "signed-bar" }, [
    el("span", { class: "bar-name token", text }),
    el("span", { class: "signed-track" }, [el("span", {
      class: value < 0 ? "signed-fill below" : "signed-fill",
      style: { width: `${(50 * Math.abs(value)) / most}%`, [value < 0 ? "right" : "left"]: "50%" },
    })]),
    el("span", { class: "bar-value", text: shownNumber(value) }),
  ]));
  return el("ol", { class: "bars", "aria-label": label }, items);
}
