// Keeps the state of the page in its address, and restores the state of an address.

import { button, el } from "./dom.js";
import { disableFor } from "./reasons.js";
import { readState, stateOf, writeState } from "./link_state.js";

const PAUSE = 200; // milliseconds; browsers limit how often the address may change

/** Returns {element, message, start}: the button that copies the link, and a line for messages. */
export function pageLink(store, tabs, setTheme) {
  const link = { initial: null, text: null, timer: null };
  const message = el("p", { class: "note link-message", role: "status", hidden: true });
  const field = el("input", { type: "url", readonly: true, hidden: true, class: "link-field", "aria-label": "Link to this state of the page" });
  const numHeads = store.data.config.num_heads ?? 1;
  const current = () => writeState(stateOf(store, tabs), numHeads);
  const say = (text) => { message.textContent = text; message.hidden = text === ""; };

  const copy = button("Copy link", async () => {
    const address = `${location.href.split("#")[0]}#${current()}`;
    try {
      await navigator.clipboard.writeText(address);
      field.hidden = true;
      say("The link is in the clipboard. It opens this page with the present text, view and selection.");
    } catch {
      field.value = address;
      field.hidden = false;
      field.select();
      say("The browser does not allow the page to copy. Copy the link from the field.");
    }
  });
  // A page in a notebook has no address.
  const hasAddress = location.protocol !== "about:";
  disableFor(copy, hasAddress ? null : "a page inside a notebook has no address; open the HTML file.");

  /** Writes the state to the address, unless the address belongs to another part, such as #tour. */
  function write() {
    const isOwn = location.hash === "" || /^#v\d+(;|$)/.test(location.hash);
    if (!hasAddress || !isOwn || (location.hash === "" && current() === link.initial)) return;
    link.text = current();
    try {
      history.replaceState(null, "", `#${link.text}`);
    } catch {
      clearTimeout(link.timer); // too many changes; the next change writes again
    }
  }
  function restore() {
    const found = readState(decodedAddress(location.hash.slice(1)), store, tabs);
    if (found?.wrong) say(`The page ignores the state in its address: “${found.wrong}” does not fit this model and this text.`);
    if (found?.state) apply({ ...link.defaults, ...found.state });
  }
  function apply({ tab, position, kind, layer, head, tokens, strengths, theme, source }) {
    const { values, data } = store;
    store.select({ kind, layer, head: head ?? 0 });
    if (theme) setTheme(theme);
    tabs.choose(tabs.views.find((view) => view.id === tab));
    if (!values.live) return store.select({ position });
    values.strengths.set(strengths);
    store.edit(() => ({ tokens: tokens ?? data.tokens, source: source ?? data.source, first: 0, select: position }));
  }
  link.start = () => {
    store.subscribe((what) => {
      if (link.initial === null) {
        if (what !== "values") return;
        link.initial = current();
        link.defaults = stateOf(store, tabs);
        return restore();
      }
      clearTimeout(link.timer);
      link.timer = setTimeout(write, PAUSE);
    });
    document.addEventListener("themechange", () => { link.timer = setTimeout(write, PAUSE); });
    addEventListener("hashchange", restore);
  };
  return { element: copy, message: el("div", {}, [message, field]), start: link.start };
}

/** Decodes an address; an address that is not encoded properly stays as it is. */
function decodedAddress(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
