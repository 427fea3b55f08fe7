// The colours and the cells of heat maps.

import { el } from "./dom.js";

// The colour is a function of share ** EXPONENT, so that small values are visible. The middle
// colour belongs to a tenth of the largest value.
const EXPONENT = 0.4, MIDDLE = 0.1 ** EXPONENT;
const NUM_COLOURS = 512;

/** Returns the theme's colours: those of the scale as [red, green, blue], the others as CSS. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const rgb = (name) => [1, 3, 5].map((i) => parseInt(read(name).slice(i, i + 2), 16));
  return {
    low: rgb("heat-low"), middle: rgb("heat-middle"), high: rgb("heat-high"),
    negativeMiddle: rgb("heat-negative-middle"), negative: rgb("heat-negative"),
    ink: read("ink"), quiet: read("quiet"), mark: read("mark"), surface: read("surface"), hatch: read("hatch"),
  };
}

/** Returns the colour of a value as [red, green, blue]. `share` is the value divided by the largest. */
export function heatColour(share, colours) {
  const place = Math.min(1, Math.abs(share)) ** EXPONENT;
  const middle = share < 0 ? colours.negativeMiddle : colours.middle;
  const end = share < 0 ? colours.negative : colours.high;
  const [from, to] = place < MIDDLE ? [colours.low, middle] : [middle, end];
  const between = place < MIDDLE ? place / MIDDLE : (place - MIDDLE) / (1 - MIDDLE);
  return from.map((value, c) => value + (to[c] - value) * between);
}

/** Returns the value with the full colour: the largest magnitude of all cells. */
export function fullColour({ values }) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

/**
 * Pools the cells of a matrix to at most `height` rows and `width` columns. A pooled cell has the
 * value of largest magnitude, with its sign. It is hidden if all cells in its area are hidden.
 */
export function pooled(matrix, height, width) {
  const { rows, columns, values, hidden } = matrix;
  if (rows <= height && columns <= width) return matrix;
  const [high, wide] = [Math.min(rows, height), Math.min(columns, width)];
  const out = new Float32Array(high * wide), outHidden = hidden && new Uint8Array(high * wide).fill(1);
  for (let row = 0; row < rows; row++) {
    const at = Math.floor((row * high) / rows) * wide;
    for (let column = 0; column < columns; column++) {
      const to = at + Math.floor((column * wide) / columns);
      const value = values[row * columns + column];
      if (Math.abs(value) > Math.abs(out[to])) out[to] = value;
      if (hidden && !hidden[row * columns + column]) outHidden[to] = 0;
    }
  }
  return { rows: high, columns: wide, values: out, hidden: outHidden };
}

/** Draws a matrix with one pixel for each cell. Hidden cells are transparent. */
export function picture({ rows, columns, values, hidden }, most) {
  const colours = themeColours();
  const scale = (sign) => Array.from({ length: NUM_COLOURS }, (_, i) => heatColour((sign * i) / (NUM_COLOURS - 1), colours));
  const positive = scale(1), negative = scale(-1);
  const image = new ImageData(columns, rows);
  for (let i = 0; i < values.length; i++) {
    const share = Math.min(1, Math.abs(values[i]) / (most || 1));
    const exact = share < 0.02 ? heatColour(share * Math.sign(values[i]), colours) : null; // steep there
    const colour = exact ?? (values[i] < 0 ? negative : positive)[Math.round(share * (NUM_COLOURS - 1))];
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colour[c];
    image.data[4 * i + 3] = hidden?.[i] ? 0 : 255;
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

/** Draws the background of hidden cells: lines from the lower left to the upper right. */
export function paintHatch(context, x, y, width, height, { surface, hatch }) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = surface;
  context.fillRect(x, y, width, height);
  context.strokeStyle = hatch;
  context.lineWidth = 1;
  context.beginPath();
  for (let start = x - height; start < x + width; start += 6) {
    context.moveTo(start, y + height);
    context.lineTo(start + height, y);
  }
  context.stroke();
  context.restore();
}
