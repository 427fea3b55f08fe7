// Reasons why a control is disabled: as its title, and as a sentence below the controls.

import { el } from "./dom.js";

/** Disables a control if there is a reason, which becomes its title; null enables the control. */
export function disableFor(control, reason) {
  control.disabled = reason !== null;
  if (reason === null) control.removeAttribute("title");
  else control.title = reason;
}

/** Returns {element, update}: a note with the reason of each disabled button. */
export function reasonNote(buttons) {
  const element = el("p", { class: "note reasons" });
  const update = () => {
    const disabled = buttons.filter((item) => item.disabled && item.title);
    element.textContent = disabled.map((item) => `${item.textContent}: ${item.title}`).join(" ");
    element.hidden = disabled.length === 0;
  };
  update();
  return { element, update };
}
