// The legend of a heat map: a colour bar with numbers, and the symbol for hidden cells.

import { heatColour, paintHatch, themeColours } from "./heat_cells.js";

const LONGEST_BAR = 170, BAR_HEIGHT = 12, EDGE = 16;
const HIDDEN_WIDTH = 210; // pixels for the sign of hidden cells
export const LEGEND_HEIGHT = 34;

/** Returns the values that the colour bar names, as shares of the largest value. */
const ticksOf = (map) => (hasNegative(map) ? [-1, 0, 1] : [0, 0.25, 0.5, 1]);

const hasNegative = ({ matrix }) => matrix.values.some((value) => value < 0);

/** Returns a text that says what the colours mean. */
export function legendText(map) {
  const { format, hiddenText, largest, matrix } = map;
  const least = hasNegative(map) ? format(-largest) : format(0);
  const hidden = matrix.hidden ? ` Hatched: ${hiddenText}.` : "";
  return `Colours from ${least} to ${format(largest)}.${hidden}`;
}

/** Draws the legend; the origin of the context is its upper left corner. */
export function paintLegend(context, map, colours, width) {
  const bar = Math.max(80, Math.min(LONGEST_BAR, width - 2 * EDGE - (map.matrix.hidden ? HIDDEN_WIDTH - EDGE : 0)));
  const { format, hiddenText, largest, matrix } = map;
  const [first] = ticksOf(map);
  for (let x = 0; x < bar; x++) {
    context.fillStyle = `rgb(${heatColour(first + ((1 - first) * x) / (bar - 1), colours)})`;
    context.fillRect(EDGE + x, 1, 1.5, BAR_HEIGHT);
  }
  context.strokeStyle = colours.quiet;
  context.lineWidth = 0.75;
  context.strokeRect(EDGE, 1, bar, BAR_HEIGHT);
  context.fillStyle = colours.quiet;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  for (const tick of ticksOf(map)) {
    const x = EDGE + ((tick - first) / (1 - first)) * bar;
    context.fillRect(x - 0.4, BAR_HEIGHT, 0.8, 5);
    context.fillText(format(tick * largest), x, BAR_HEIGHT + 17);
  }
  if (!matrix.hidden) return;
  const start = EDGE + bar + 24;
  paintHatch(context, start, 1, 20, BAR_HEIGHT, colours);
  context.strokeRect(start, 1, 20, BAR_HEIGHT);
  context.textAlign = "left";
  context.fillStyle = colours.quiet;
  context.fillText(hiddenText, start + 26, BAR_HEIGHT - 1);
}

/** Draws the legend on its own canvas, and describes it for a screen reader. */
export function drawLegend(canvas, map, width, scale) {
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(LEGEND_HEIGHT * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${LEGEND_HEIGHT}px`;
  canvas.setAttribute("aria-label", legendText(map));
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  paintLegend(context, map, themeColours(), width);
}
