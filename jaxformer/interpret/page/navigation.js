// Opens tabs and their parts, for the drawing and for the tour.

/** Returns {title, find, open}. A target is [view, selector]; the view null is the text above the tabs. */
export function createNavigation(tabs) {
  const viewOf = (id) => tabs.views.find((view) => view.id === id);
  const navigation = {};
  /** Returns the name of a target, such as "the tab Heads"; null if the page does not have it. */
  navigation.title = ([id]) => (id === null ? "the text" : viewOf(id) ? `the tab ${viewOf(id).title}` : null);
  /** Chooses the tab of a target and returns its element, or null. */
  navigation.find = ([id, selector]) => {
    const view = viewOf(id);
    if (id !== null && !view) return null;
    if (view && tabs.chosen !== view) tabs.choose(view);
    return (selector && document.querySelector(selector)) ?? view?.panel ?? null;
  };
  /** Chooses the tab of a target, scrolls to its element and gives it the focus. */
  navigation.open = (target) => {
    const element = navigation.find(target);
    if (!element) return;
    if (element.tabIndex < 0) element.tabIndex = -1;
    element.focus({ preventScroll: true });
    scrollToTop(element);
  };
  return navigation;
}

/** Scrolls the page so that the top of an element is near the top of the window. */
export function scrollToTop(element) {
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ block: "start", behavior: isCalm ? "auto" : "smooth" });
}
