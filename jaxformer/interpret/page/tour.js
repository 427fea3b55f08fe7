// The guided tour: a panel beside the page that goes from part to part and explains each.

import { button, el } from "./dom.js";
import { scrollToTop } from "./navigation.js";
import { placePanel } from "./tour_place.js";
import { tourSteps } from "./tour_steps.js";

/** Returns {button, open, close}. The address part #tour opens the tour as well. */
export function createTour(store) {
  const tour = { steps: [], at: -1, moving: false, opener: null };
  const count = el("p", { class: "tour-count" });
  const title = el("h2", { id: "tour-title", tabindex: -1 });
  const text = el("p", {});
  const back = button("Back", () => go(tour.at - 1));
  const next = button("Next", () => (tour.at === tour.steps.length - 1 ? close() : go(tour.at + 1)));
  const end = button("Close", () => close());
  const said = el("div", { "aria-live": "polite" }, [count, title, text]);
  const panel = el("section", { class: "tour", role: "dialog", "aria-modal": "false", "aria-labelledby": "tour-title", hidden: true }, [
    said, el("div", { class: "buttons" }, [back, next, end]),
  ]);
  document.body.append(panel);
  tour.panel = panel;
  tour.button = button("Tour", () => open(), { class: "tour-button", title: "A guided tour of this model in a few steps", "aria-haspopup": "dialog" });

  function open() {
    if (tour.at < 0) tour.opener = document.activeElement;
    tour.steps = tourSteps(store);
    panel.hidden = false;
    document.body.classList.add("touring");
    go(0);
    title.focus({ preventScroll: true });
  }
  function close() {
    if (tour.at < 0) return;
    tour.at = -1;
    panel.hidden = true;
    document.body.classList.remove("touring");
    unmark();
    const to = tour.opener?.isConnected && tour.opener !== document.body ? tour.opener : tour.button;
    to.focus({ preventScroll: true });
  }
  /** Shows a step: opens its tab, marks its part and scrolls to it. */
  function go(at) {
    tour.at = at;
    const step = tour.steps[at];
    tour.moving = true;
    store.navigation.find([step.view]);
    step.prepare?.(store);
    tour.moving = false;
    scrollToTop(show());
  }
  /** Writes the text of the step and marks its part, which it returns. */
  function show() {
    const { title: name, text: textOf, parts } = tour.steps[tour.at];
    count.textContent = `Step ${tour.at + 1} of ${tour.steps.length}`;
    title.textContent = name;
    text.textContent = textOf(store) ?? "";
    back.disabled = tour.at === 0;
    back.title = back.disabled ? "This is the first step." : "";
    next.textContent = tour.at === tour.steps.length - 1 ? "Finish" : "Next";
    unmark();
    const part = placePanel(panel, parts(store).map((selector) => document.querySelector(selector)));
    part.classList.add("toured");
    return part;
  }
  const unmark = () => document.querySelectorAll(".toured").forEach((part) => part.classList.remove("toured"));

  store.subscribe((what) => {
    if (tour.at >= 0 && !tour.moving && (what === "values" || what === "selection" || what === "view")) show();
  });
  addEventListener("resize", () => tour.at >= 0 && show());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.defaultPrevented) close();
  });
  openByAddress(store, open);
  return Object.assign(tour, { open, close });
}

/** Opens the tour if the address of the page ends with #tour, once the values are computed. */
function openByAddress(store, open) {
  const isAsked = () => location.hash.slice(1).split(/[;&]/).includes("tour");
  let waits = isAsked();
  store.subscribe((what) => {
    if (what !== "values" || !waits) return;
    waits = false;
    open();
  });
  addEventListener("hashchange", () => isAsked() && store.version > 0 && open());
}
