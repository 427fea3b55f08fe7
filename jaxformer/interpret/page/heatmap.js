// A heat map on a canvas, with labels, a pointer and a keyboard cursor.

import { el } from "./dom.js";

const SMALLEST_LABEL = 9; // pixels of a row or a column with a label
const LABEL_SPACE = 78;
const LARGEST_CELL = 44;

/**
 * Returns {element, draw, moveTo}.
 *
 * `describe(row, column, value)` is the text of a cell, shown below and read by a screen reader.
 * `pick(row, column)` is called on a click and on Enter. `height` is the largest height in pixels.
 * A matrix is {rows, columns, values} with optional rowNames, columnNames, marks [[row, column]], a
 * highlighted row, `largest`, the value with the full colour, and `isGrowing` if its values change.
 */
export function heatmap({ label, describe, pick = () => {}, height = 720 }) {
  const canvas = el("canvas", { class: "heat", tabindex: 0, role: "application" });
  canvas.setAttribute("aria-roledescription", "heat map");
  canvas.setAttribute("aria-label", `${label}. Arrow keys move between the cells, Enter selects.`);
  const readout = el("p", { class: "readout", role: "status", text: "Point at a cell, or use the arrow keys." });
  const element = el("div", { class: "heat-box" }, [canvas, readout]);
  const map = { matrix: null, cursor: [0, 0], moved: false, pictures: new Map(), layout: null };

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
    map.layout = layoutOf(map.matrix, element.clientWidth, height);
    paintAll(canvas, map);
  }
  function moveTo(row, column) {
    map.cursor = [row, column];
    map.moved = true;
    const { values, columns } = map.matrix;
    readout.textContent = describe(row, column, values[row * columns + column]);
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
  return { element, canvas, draw, moveTo };
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

/** Returns the sizes of the cells, with space for labels where they can be read. */
function layoutOf(matrix, width, height) {
  const left = matrix.rowNames ? LABEL_SPACE : 0, top = matrix.columnNames ? LABEL_SPACE : 0;
  const { high, wide } = cellSize(matrix, width - left, height - top);
  const margins = { left: high < SMALLEST_LABEL ? 0 : left, top: wide < SMALLEST_LABEL ? 0 : top };
  const size = cellSize(matrix, width - margins.left, height - margins.top);
  const total = { width: margins.left + size.wide * matrix.columns, height: margins.top + size.high * matrix.rows };
  return { ...margins, ...size, ...total };
}

function cellSize({ rows, columns }, width, height) {
  const cell = Math.min(width / columns, height / rows, LARGEST_CELL);
  if (rows * 3 >= columns) return { wide: cell, high: cell };
  // A wide matrix fills the width with cells that are not square.
  return { wide: width / columns, high: Math.max(cell, Math.min(24, height / rows)) };
}

function cellAt({ matrix, layout }, x, y) {
  const row = Math.floor((y - layout.top) / layout.high);
  const column = Math.floor((x - layout.left) / layout.wide);
  return row >= 0 && column >= 0 && row < matrix.rows && column < matrix.columns ? [row, column] : null;
}

/** Returns the colours of the theme as {low, high, ink, quiet, mark}, as CSS and as RGB. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const rgb = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  return {
    low: rgb(read("--heat-low")), high: rgb(read("--heat-high")), negative: rgb(read("--heat-negative")),
    ink: read("--ink"), quiet: read("--quiet"), mark: read("--mark"),
  };
}

/** Returns the value with the full colour: the largest magnitude of all cells. */
export function fullColour({ values }) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

/**
 * Returns the matrix with at most so many rows and columns. A cell is that one of its cells with the
 * largest magnitude, with its sign.
 */
export function pooled(matrix, height, width) {
  const { rows, columns, values } = matrix;
  if (rows <= height && columns <= width) return matrix;
  const [high, wide] = [Math.min(rows, height), Math.min(columns, width)];
  const out = new Float32Array(high * wide);
  for (let row = 0; row < rows; row++) {
    const at = Math.floor((row * high) / rows) * wide;
    for (let column = 0; column < columns; column++) {
      const to = at + Math.floor((column * wide) / columns);
      const value = values[row * columns + column];
      if (Math.abs(value) > Math.abs(out[to])) out[to] = value;
    }
  }
  return { rows: high, columns: wide, values: out };
}

/** Draws a matrix with one pixel for each cell. The value `most` has the full colour. */
function picture({ rows, columns, values }, most) {
  const { low, high, negative } = themeColours();
  const image = new ImageData(columns, rows);
  for (let i = 0; i < values.length; i++) {
    const share = Math.min(1, Math.abs(values[i]) / (most || 1)) ** 0.7; // small values stay visible
    const end = values[i] < 0 ? negative : high;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = low[c] + (end[c] - low[c]) * share;
    image.data[4 * i + 3] = 255;
  }
  const canvas = el("canvas", { width: columns, height: rows });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** Draws a small picture of a matrix, in which each pixel has the cell of largest magnitude. */
export function thumbnail(canvas, matrix, size = 44) {
  const small = pooled(matrix, size, size);
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(picture(small, fullColour(small)), 0, 0, size, size);
}

function paintAll(canvas, map) {
  const { matrix, cursor, moved, layout } = map;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(layout.width * scale);
  canvas.height = Math.round(layout.height * scale);
  canvas.style.width = `${layout.width}px`;
  canvas.style.height = `${layout.height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const { ink, quiet, mark } = themeColours();
  const cells = cellPicture(map, scale);
  context.imageSmoothingEnabled = false;
  context.drawImage(cells, layout.left, layout.top, layout.wide * matrix.columns, layout.high * matrix.rows);
  paintLabels(context, matrix, layout, cursor, ink, quiet);
  context.strokeStyle = mark;
  context.lineWidth = 1.5;
  const outline = (row, column, num, inset = 0) => context.strokeRect(
    layout.left + column * layout.wide + inset, layout.top + row * layout.high + inset,
    Math.max(num * layout.wide - 2 * inset, 3), Math.max(layout.high - 2 * inset, 3));
  if (matrix.row !== undefined) outline(matrix.row, 0, matrix.columns, 0.5);
  if (moved) outline(...cursor, 1, 0.5);
  for (const [row, column] of matrix.marks ?? []) outline(row, column, 1, 3);
}

/** Returns the picture of the cells, pooled if they are smaller than a pixel of the screen. */
function cellPicture({ matrix, layout, pictures, largest }, scale) {
  const size = (cell, num) => Math.max(1, Math.floor(cell * num * scale));
  const small = pooled(matrix, size(layout.high, matrix.rows), size(layout.wide, matrix.columns));
  const name = `${small.rows}x${small.columns}`;
  if (!pictures.has(name)) pictures.set(name, picture(small, largest || 1));
  return pictures.get(name);
}

function paintLabels(context, matrix, layout, cursor, ink, quiet) {
  context.font = `${Math.max(9, Math.min(12, layout.high - 1))}px ui-monospace, monospace`;
  context.textBaseline = "middle";
  if (layout.left) {
    context.textAlign = "right";
    matrix.rowNames.forEach((name, row) => {
      context.fillStyle = row === cursor[0] ? ink : quiet;
      const y = layout.top + (row + 0.5) * layout.high;
      context.fillText(shortName(name), layout.left - 6, y, layout.left - 8);
    });
  }
  if (!layout.top) return;
  context.textAlign = "left";
  matrix.columnNames.forEach((name, column) => {
    context.save();
    context.fillStyle = column === cursor[1] ? ink : quiet;
    context.translate(layout.left + (column + 0.5) * layout.wide, layout.top - 6);
    context.rotate(-Math.PI / 2);
    context.fillText(shortName(name), 0, 0, layout.top - 8);
    context.restore();
  });
}

function shortName(name) {
  return name.length > 10 ? `${name.slice(0, 9)}…` : name;
}
