// Draws a heat map on a canvas: its layout, its cells and its labels.

import { el } from "./dom.js";
import { paintHatch, picture, pooled, themeColours } from "./heat_cells.js";
import { paintLegend } from "./heat_legend.js";

const LABEL_PITCH = 12; // the smallest distance of two labels in pixels
const LABEL_SPACE = 78, LEAST_LABEL_SPACE = 52;
const LABEL_CHARACTER = 7.3; // pixels
const LARGEST_CELL = 44;
const SAVED_SCALE = 2, SAVED_MARGIN = 16, SAVED_TITLE = 30, SAVED_LEGEND = 44;

/** Returns the sizes of the cells and the space for the labels. */
export function layoutOf(matrix, width, height) {
  const space = Math.max(LEAST_LABEL_SPACE, Math.min(LABEL_SPACE, Math.floor(width / 8)));
  const left = labelSpace(matrix.rowNames, matrix.hasWholeRows, space);
  const top = labelSpace(matrix.columnNames, matrix.hasWholeColumns, space);
  const size = cellSize(matrix, width - left, height - top);
  return { left, top, ...size, width: left + size.wide * matrix.columns, height: top + size.high * matrix.rows };
}

/** Returns the space for names in pixels. If `whole`, the longest name fits without a cut. */
function labelSpace(names, whole, space) {
  if (!names) return 0;
  const longest = whole ? names.reduce((most, { length }) => Math.max(most, length), 0) : 0;
  return Math.max(space, Math.ceil(longest * LABEL_CHARACTER) + 10);
}

function cellSize({ rows, columns }, width, height) {
  const cell = Math.min(width / columns, height / rows, LARGEST_CELL);
  if (rows * 3 >= columns) return { wide: cell, high: cell };
  // A wide matrix fills the width with cells that are not square.
  return { wide: width / columns, high: Math.max(cell, Math.min(24, height / rows)) };
}

export function paintHeat(canvas, map, scale) {
  const { matrix, cursor, moved, layout } = map;
  canvas.width = Math.round(layout.width * scale);
  canvas.height = Math.round(layout.height * scale);
  canvas.style.width = `${layout.width}px`;
  canvas.style.height = `${layout.height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const colours = themeColours();
  const area = [layout.left, layout.top, layout.wide * matrix.columns, layout.high * matrix.rows];
  if (matrix.hidden) paintHatch(context, ...area, colours);
  context.imageSmoothingEnabled = false;
  context.drawImage(cellPicture(map, scale), ...area);
  paintLabels(context, map, colours);
  context.strokeStyle = colours.mark;
  context.lineWidth = 1.5;
  const outline = (row, column, down, across, inset = 0.5) => context.strokeRect(
    layout.left + column * layout.wide + inset, layout.top + row * layout.high + inset,
    Math.max(across * layout.wide - 2 * inset, 3), Math.max(down * layout.high - 2 * inset, 3));
  if (matrix.row !== undefined) outline(matrix.row, 0, 1, matrix.columns);
  if (matrix.column !== undefined) outline(0, matrix.column, matrix.rows, 1);
  if (moved) outline(...cursor, 1, 1);
  for (const [row, column] of matrix.marks ?? []) outline(row, column, 1, 1, 3);
}

/** Returns the picture of the cells, pooled if they are smaller than a pixel of the screen. */
function cellPicture({ matrix, layout, pictures, largest }, scale) {
  const size = (cell, num) => Math.max(1, Math.floor(cell * num * scale));
  const small = pooled(matrix, size(layout.high, matrix.rows), size(layout.wide, matrix.columns));
  const name = `${small.rows}x${small.columns}`;
  if (!pictures.has(name)) pictures.set(name, picture(small, largest || 1));
  return pictures.get(name);
}

/**
 * Returns the indices of the rows or columns with a label. The labels in `wanted` are always
 * included. The other labels are thinned out, so that no two labels are closer than LABEL_PITCH.
 */
export function labelled(num, cell, wanted) {
  const step = Math.max(1, Math.ceil(LABEL_PITCH / cell - 0.01));
  const kept = [...new Set(wanted)].filter((i) => i >= 0 && i < num);
  const others = Array.from({ length: Math.ceil(num / step) }, (_, i) => i * step);
  return [...kept, ...others.filter((i) => kept.every((j) => Math.abs(i - j) * cell >= LABEL_PITCH - 0.1))];
}

function paintLabels(context, { matrix, layout, cursor, moved }, { ink, quiet }) {
  const rows = [...(moved ? [cursor[0]] : []), matrix.row ?? -1];
  const columns = [...(moved ? [cursor[1]] : []), matrix.column ?? -1];
  const paint = (name, isWanted, width, cell) => {
    context.fillStyle = isWanted ? ink : quiet;
    context.font = `${isWanted ? 600 : 400} ${Math.max(10, Math.min(12, cell - 1))}px ui-monospace, monospace`;
    context.fillText(fittedName(context, name, width), 0, 0);
  };
  context.textBaseline = "middle";
  for (const row of matrix.rowNames ? labelled(matrix.rows, layout.high, rows) : []) {
    context.save();
    context.textAlign = "right";
    context.translate(layout.left - 6, layout.top + (row + 0.5) * layout.high);
    paint(matrix.rowNames[row], rows.includes(row), layout.left - 8, layout.high);
    context.restore();
  }
  for (const column of matrix.columnNames ? labelled(matrix.columns, layout.wide, columns) : []) {
    context.save();
    context.translate(layout.left + (column + 0.5) * layout.wide, layout.top - 6);
    context.rotate(-Math.PI / 2);
    paint(matrix.columnNames[column], columns.includes(column), layout.top - 8, layout.wide);
    context.restore();
  }
}

/** Returns a name, shortened until it fits into the width. */
function fittedName(context, name, width) {
  if (context.measureText(name).width <= width) return name;
  let end = Math.min(name.length - 1, 12);
  while (end > 1 && context.measureText(`${name.slice(0, end)}…`).width > width) end--;
  return `${name.slice(0, end)}…`;
}

/** Returns a canvas with the title, the heat map and its legend, to be saved as a file. */
export function savedHeat(map, title) {
  const colours = themeColours(), cells = el("canvas");
  paintHeat(cells, { ...map, moved: false, pictures: new Map() }, SAVED_SCALE);
  const width = Math.max(map.layout.width, 340) + 2 * SAVED_MARGIN;
  const height = SAVED_TITLE + map.layout.height + SAVED_LEGEND + 2 * SAVED_MARGIN;
  const canvas = el("canvas", { width: Math.round(width * SAVED_SCALE), height: Math.round(height * SAVED_SCALE) });
  const context = canvas.getContext("2d");
  context.scale(SAVED_SCALE, SAVED_SCALE);
  context.fillStyle = colours.surface;
  context.fillRect(0, 0, width, height);
  context.translate(SAVED_MARGIN, SAVED_MARGIN);
  context.fillStyle = colours.ink;
  context.font = "600 14px system-ui, sans-serif";
  context.fillText(title, 0, 14, width - 2 * SAVED_MARGIN);
  context.drawImage(cells, 0, SAVED_TITLE, map.layout.width, map.layout.height);
  context.translate(0, SAVED_TITLE + map.layout.height + 10);
  paintLegend(context, map, colours, width - 2 * SAVED_MARGIN);
  return canvas;
}
