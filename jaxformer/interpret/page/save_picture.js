// Saves the pictures of the shown view as a file: heat maps as PNG, drawings as SVG.

import { button, svg } from "./dom.js";
import { themeColours } from "./heat_cells.js";
import { savedCanvases } from "./heatmap.js";
import { disableFor } from "./reasons.js";

const INLINED = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "display", "visibility",
];
const MARGIN = 16, TITLE_HEIGHT = 26;

const isShown = (element) => element.getClientRects().length > 0;

/** Returns the visible pictures of a panel: its heat maps or, if it has none, its drawings. */
export function picturesOf(panel) {
  const heats = [...panel.querySelectorAll("canvas.heat")].filter((x) => isShown(x) && savedCanvases.has(x));
  const drawings = [...panel.querySelectorAll("svg")].filter((x) => isShown(x) && !x.parentElement.closest("svg"));
  return heats.length ? { heats, drawings: [] } : { heats, drawings };
}

/** Returns {element, update} of the button that saves the pictures of the shown view. */
export function saveButton(tabs, title) {
  const element = button("Save picture", async () => {
    const { heats, drawings } = picturesOf(tabs.chosen.panel);
    const name = `${title}-${tabs.chosen.id}`.replace(/[^\w.-]+/g, "-");
    if (heats.length) {
      const canvas = stacked(heats.map((heat) => savedCanvases.get(heat)()));
      canvas.toBlob((blob) => download(blob, `${name}.png`), "image/png");
    } else if (drawings.length) {
      const text = new XMLSerializer().serializeToString(stackedDrawings(drawings));
      download(new Blob([text], { type: "image/svg+xml" }), `${name}.svg`);
    }
  });
  const update = () => {
    const { heats, drawings } = picturesOf(tabs.chosen.panel);
    disableFor(element, heats.length + drawings.length ? null : "this view has no picture.");
  };
  return { element, update };
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Returns one canvas with all canvases below each other. */
function stacked(canvases) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(...canvases.map((x) => x.width));
  canvas.height = canvases.reduce((sum, x) => sum + x.height, 0);
  const context = canvas.getContext("2d");
  context.fillStyle = themeColours().surface;
  context.fillRect(0, 0, canvas.width, canvas.height);
  let y = 0;
  for (const part of canvases) {
    context.drawImage(part, 0, y);
    y += part.height;
  }
  return canvas;
}

/** Returns one SVG element with all drawings below each other, each with its title. */
function stackedDrawings(drawings) {
  const { surface, ink } = themeColours();
  const parts = [];
  let y = MARGIN, widest = 0;
  for (const drawing of drawings) {
    const { width, height } = drawing.getBoundingClientRect();
    const title = drawing.closest("figure")?.querySelector("figcaption")?.innerText.replace(/\s+/g, " ") ?? drawing.getAttribute("aria-label") ?? "";
    parts.push(svg("text", { x: MARGIN, y: y + 14, fill: ink, "font-size": "13px", "font-family": "system-ui, sans-serif", text: title }));
    const copy = inlined(drawing);
    for (const [name, value] of Object.entries({ x: MARGIN, y: y + TITLE_HEIGHT, width, height })) copy.setAttribute(name, value);
    parts.push(copy);
    y += TITLE_HEIGHT + height + MARGIN;
    widest = Math.max(widest, width, 7 * title.length);
  }
  const size = { width: widest + 2 * MARGIN, height: y };
  return svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${size.width} ${size.height}`, ...size }, [
    svg("rect", { ...size, fill: surface }), ...parts,
  ]);
}

/** Returns a copy of a drawing in which each element has its computed style as attributes. */
function inlined(drawing) {
  const copy = drawing.cloneNode(true);
  const originals = [drawing, ...drawing.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of INLINED) element.setAttribute(name, style.getPropertyValue(name));
    element.removeAttribute("class");
    element.removeAttribute("style");
  });
  return copy;
}
