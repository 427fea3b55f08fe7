// A heat map on a canvas, with labels, a legend, a pointer and a keyboard cursor.

import { button, el } from "./dom.js";
import { fullColour } from "./heat_cells.js";
import { drawLegend } from "./heat_legend.js";
import { layoutOf, paintHeat, savedHeat } from "./heat_paint.js";

// {canvas: function that returns the canvas to save as a file}.
export const savedCanvases = new WeakMap();

/** Returns a number with two significant digits. */
const shortNumber = (x) => String(Number(x.toPrecision(2))).replace("-", "−");

/** Returns the height of a large heat map, which grows with the screen. */
const usualHeight = () => Math.max(720, Math.min(1200, 0.42 * window.innerWidth));

/**
 * Returns {element, canvas, draw, moveTo}.
 *
 * `describe(row, column, value, isHidden)` is the text of a cell, shown below and read by a screen
 * reader. `pick(row, column)` is called on a click and on Enter. `height` is the largest height in
 * pixels. `format` writes the numbers of the legend, and `hiddenText` says what hatched cells are. A
 * matrix is {rows, columns, values} with optional rowNames, columnNames, marks [[row, column]], a
 * highlighted row or column, `hasWholeRows` or `hasWholeColumns` if no name of rows or columns may be
 * cut, `hidden` (1 for a hatched cell), `largest`, the value with the full colour, and `isGrowing` if
 * its values change.
 */
export function heatmap({
  label, describe, pick = () => {}, height = null, format = shortNumber, hiddenText = "cannot be seen (masked)",
}) {
  const canvas = el("canvas", { class: "heat", tabindex: 0, role: "application" });
  canvas.setAttribute("aria-roledescription", "heat map");
  canvas.setAttribute("aria-label", `${label}. Arrow keys move between the cells, Enter selects.`);
  const legend = el("canvas", { class: "heat-legend", role: "img" });
  const readout = el("p", { class: "readout", role: "status", text: "Point at or tap a cell, or use the arrow keys." });
  const map = { matrix: null, cursor: [0, 0], moved: false, pictures: new Map(), layout: null, format, hiddenText };
  const steps = stepButtons(map, (row, column) => { moveTo(row, column); pick(row, column); });
  const element = el("div", { class: "heat-box" }, [canvas, legend, readout, steps]);

  function draw(matrix, isNew = matrix.isGrowing || map.matrix?.values !== matrix.values) {
    map.matrix = matrix;
    if (isNew) {
      map.pictures.clear();
      map.largest = matrix.largest ?? fullColour(matrix);
    }
    map.cursor = [Math.min(map.cursor[0], matrix.rows - 1), Math.min(map.cursor[1], matrix.columns - 1)];
    paint();
  }
  function paint() {
    if (!map.matrix || !canvas.isConnected || !element.clientWidth) return;
    const scale = window.devicePixelRatio || 1;
    map.layout = layoutOf(map.matrix, element.clientWidth, height ?? usualHeight());
    paintHeat(canvas, map, scale);
    drawLegend(legend, map, Math.min(element.clientWidth, 400), scale);
  }
  function moveTo(row, column) {
    map.cursor = [row, column];
    map.moved = true;
    const { values, columns, hidden } = map.matrix;
    const i = row * columns + column;
    readout.textContent = describe(row, column, values[i], Boolean(hidden?.[i]));
    paint();
  }
  canvas.addEventListener("pointermove", (event) => {
    const cell = map.layout && cellAt(map, event.offsetX, event.offsetY);
    if (cell && String(cell) !== String(map.cursor)) moveTo(...cell);
  });
  canvas.addEventListener("click", (event) => {
    const cell = map.layout && cellAt(map, event.offsetX, event.offsetY);
    if (cell) { moveTo(...cell); pick(...cell); }
  });
  canvas.addEventListener("focus", () => map.matrix && moveTo(...map.cursor));
  canvas.addEventListener("keydown", (event) => {
    if (!map.matrix) return;
    const to = movedCursor(map, event);
    if (to) { event.preventDefault(); moveTo(...to); }
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(...map.cursor); }
  });
  new ResizeObserver(paint).observe(element);
  document.addEventListener("themechange", () => { if (map.matrix) draw(map.matrix, true); });
  savedCanvases.set(canvas, () => savedHeat(map, label));
  return { element, canvas, draw, moveTo };
}

/** Returns buttons that move the cursor by one cell, for fingers that are wider than a cell. */
function stepButtons(map, moveTo) {
  const step = (text, label, down, across) => button(text, () => {
    const { matrix, cursor: [row, column] } = map;
    const clamp = (x, size) => Math.max(0, Math.min(size - 1, x));
    if (matrix) moveTo(clamp(row + down, matrix.rows), clamp(column + across, matrix.columns));
  }, { "aria-label": label, title: label });
  return el("div", { class: "buttons heat-steps", role: "group", "aria-label": "Move by one cell" }, [
    step("←", "one cell to the left", 0, -1), step("↑", "one cell up", -1, 0),
    step("↓", "one cell down", 1, 0), step("→", "one cell to the right", 0, 1),
  ]);
}

function movedCursor({ matrix, cursor: [row, column] }, event) {
  const step = event.shiftKey ? 10 : 1;
  const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
  const ends = { Home: [row, 0], End: [row, matrix.columns - 1] };
  ends.PageUp = [0, column];
  ends.PageDown = [matrix.rows - 1, column];
  const clamp = (x, size) => Math.max(0, Math.min(size - 1, x));
  const move = moves[event.key];
  if (move) return [clamp(row + move[0], matrix.rows), clamp(column + move[1], matrix.columns)];
  return ends[event.key] ?? null;
}

function cellAt({ matrix, layout }, x, y) {
  const row = Math.floor((y - layout.top) / layout.high);
  const column = Math.floor((x - layout.left) / layout.wide);
  return row >= 0 && column >= 0 && row < matrix.rows && column < matrix.columns ? [row, column] : null;
}
