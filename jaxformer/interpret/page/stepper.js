// A list of steps with "Previous step" and "Next step". A narrow screen shows one step at a time.

import { button, el } from "./dom.js";

/** Returns {element, steps, choose}. `titles` are the titles of the steps; `steps` are their bodies. */
export function stepper(titles, label) {
  const chosen = { step: 0 };
  const previous = button("Previous step", () => choose(chosen.step - 1));
  const next = button("Next step", () => choose(chosen.step + 1));
  const numbers = titles.map((title, i) =>
    button(String(i + 1), () => choose(i), { class: "step-number", "aria-label": `Step ${i + 1}: ${title}` }));
  const steps = titles.map((title, i) => {
    const body = el("div", { class: "step-body" });
    const heading = el("h3", {}, [el("span", { class: "step-mark", text: i + 1 }), title]);
    return { body, element: el("section", { class: "step", "aria-label": `Step ${i + 1}: ${title}` }, [heading, body]) };
  });
  const controls = el("div", { class: "buttons step-controls", role: "group", "aria-label": label }, [previous, ...numbers, next]);

  function choose(step) {
    chosen.step = Math.max(0, Math.min(titles.length - 1, step));
    numbers.forEach((number, i) => number.setAttribute("aria-current", i === chosen.step ? "step" : "false"));
    steps.forEach(({ element }, i) => element.classList.toggle("current", i === chosen.step));
    previous.disabled = chosen.step === 0;
    next.disabled = chosen.step === titles.length - 1;
    previous.title = previous.disabled ? "This is the first step." : "";
    next.title = next.disabled ? "This is the last step." : "";
  }
  choose(0);
  const element = el("div", { class: "stepper" }, [controls, el("div", { class: "steps" }, steps.map((step) => step.element))]);
  return { element, bodies: steps.map(({ body }) => body), choose };
}
