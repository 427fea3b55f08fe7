// Builds the page from its data.

import { missingText } from "./applies.js";
import { unpackAll } from "./arrays.js";
import { attentionView } from "./attention_view.js";
import { compareView } from "./compare_view.js";
import { decodingView } from "./decoding_view.js";
import { dependencyView } from "./dependency_view.js";
import { button, el, note } from "./dom.js";
import { fieldView } from "./field_view.js";
import { heatColour, themeColours } from "./heat_cells.js";
import { headsView } from "./heads_view.js";
import { insideNumbers } from "./inside_values.js";
import { insideView } from "./inside_view.js";
import { lensView } from "./lens_view.js";
import { pageLink } from "./link.js";
import { maskView } from "./mask_view.js";
import { modelView } from "./model_view.js";
import { createNavigation } from "./navigation.js";
import { normView } from "./norm_view.js";
import { roundingNote } from "./rounding.js";
import { saveButton } from "./save_picture.js";
import { statesView } from "./states_view.js";
import { createStore } from "./store.js";
import { textPanel } from "./text_panel.js";
import { createTour } from "./tour.js";

async function startPage() {
  const data = await unpackAll(JSON.parse(document.getElementById("data").textContent));
  const store = createStore(data);
  const panel = textPanel(store);
  const views = [
    modelView(store), statesView(store), fieldView(store), maskView(store), attentionView(store, panel),
    insideView(store), lensView(store), normView(store), dependencyView(store), decodingView(store),
    headsView(store), compareView(store),
  ].filter(Boolean);
  const status = el("span", { class: "status", role: "status" });
  const tabs = tabList(store, panel, views);
  store.navigation = createNavigation(tabs);
  const save = saveButton(tabs, data.title), link = pageLink(store, tabs, setTheme);
  const actions = el("div", { class: "page-actions" }, [save.element, link.element]);
  document.body.append(
    pageHead(store, status),
    el("main", {}, [panel.element, el("div", { class: "tab-row" }, [actions, tabs.element]), link.message, ...views.map((view) => view.panel)]),
  );
  store.subscribe((what) => {
    if (what === "busy") status.textContent = store.busy ? "computing…" : "";
    if (what === "values" || what === "selection") panel.update(what);
    if (what === "selection" || what === "values" || what === "strengths" || what === "view") tabs.show(what);
    if (what === "values" || what === "view") save.update();
  });
  store.tour = createTour(store);
  document.querySelector(".head-row .theme").before(store.tour.button);
  expose(store, tabs);
  link.start();
  if (store.values.live) store.setTokens(data.tokens);
  else store.notify("values");
}

function pageHead(store, status) {
  const { data } = store, missing = missingText(store);
  const facts = data.facts.map(([name, value]) => el("span", { class: "fact" }, [el("b", { text: value }), ` ${name === "kind" ? "" : name}`]));
  const mode = data.mode === "live"
    ? "Live: this page contains the weights and runs the model in your browser."
    : `Captured: ${data.reason}, so this page shows values that JAX computed.`;
  const agreement = el("span", { id: "agreement" });
  const theme = button("", () => setTheme(isDark() ? "light" : "dark"), { class: "theme" });
  const label = () => (theme.textContent = isDark() ? "Light theme" : "Dark theme");
  document.addEventListener("themechange", label);
  label();
  return el("header", {}, [
    el("div", { class: "head-row" }, [el("h1", { text: data.title }), status, theme]),
    el("p", { class: "fact-row" }, facts),
    el("p", { class: "note" }, [mode, " ", agreement]),
    roundingNote(store),
    missing ? note(missing) : null,
  ]);
}

const isDark = () => document.documentElement.dataset.theme
  ? document.documentElement.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new CustomEvent("themechange"));
}

/** Returns {element, show, choose}: tabs, of which the arrow keys choose one. */
function tabList(store, panel, views) {
  const element = el("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
  const tabs = { element, views, chosen: views[0] };
  views.forEach((view) => {
    const id = `tab-${view.id}`;
    view.tab = el("button", { type: "button", role: "tab", id, text: view.title, "aria-controls": `view-${view.id}` });
    view.tab.addEventListener("click", () => tabs.choose(view));
    view.panel = el("div", { role: "tabpanel", id: `view-${view.id}`, "aria-labelledby": id, hidden: true }, [view.element]);
    element.append(view.tab);
  });
  tabs.choose = (view) => {
    tabs.chosen = view;
    store.notify("view");
  };
  tabs.show = (what) => {
    for (const view of views) {
      const isChosen = view === tabs.chosen;
      view.tab.setAttribute("aria-selected", String(isChosen));
      view.tab.tabIndex = isChosen ? 0 : -1;
      view.panel.hidden = !isChosen;
    }
    if (tabs.chosen.id !== "attention") panel.shade(null);
    tabs.chosen.update(what === "view" ? "values" : what);
  };
  element.addEventListener("keydown", (event) => {
    const at = views.indexOf(tabs.chosen), last = views.length - 1;
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    tabs.choose(views[to]);
    views[to].tab.focus();
  });
  return tabs;
}

/** Offers the values of the page to scripts and tests, and compares the logits with JAX's. */
function expose(store, tabs) {
  const { values, data } = store;
  globalThis.jaxformerPage = {
    store,
    tabs,
    logits: (position) => Array.from(values.logits(position)),
    attention: (kind, layer, head) => values.attention(kind, layer, head),
    inside: (layer, head, position) => insideNumbers(store, layer, head, position),
    colour: (share) => heatColour(share, themeColours()),
  };
  if (!values.live) return;
  let isFirst = true;
  store.subscribe((what) => {
    if (what !== "values" || !isFirst) return;
    isFirst = false;
    const found = values.logits(store.tokens.length - 1);
    const difference = found.reduce((most, y, i) => Math.max(most, Math.abs(y - data.expected.data[i])), 0);
    jaxformerPage.difference = difference;
    document.getElementById("agreement").textContent =
      `Its logits differ from JAX's by at most ${difference.toExponential(1)}.`;
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.dispatchEvent(new CustomEvent("themechange")));
startPage().catch((error) => {
  document.body.append(note(`This page cannot be shown: ${error.message}`));
  throw error;
});
