// Rows of numbers as coloured cells, whose values are read by pointing or with the arrow keys.

import { el, svg } from "./dom.js";
import { shownNumber } from "./formula.js";

const CELL_WIDTH = 26; // pixels of a cell, at most

/**
 * Returns {element, draw}.
 *
 * `draw(rows)` shows rows [{name, values}]. `describe(row, column, value)` is the text of a cell.
 * `pick(column)` is called by a click and by Enter.
 */
export function numberGrid({ label, describe, pick = null }) {
  const cells = el("div", { class: "grid-rows", tabindex: 0, role: "application", "aria-roledescription": "row of numbers" });
  const keys = pick ? "Arrow keys move between the numbers, Enter selects." : "Arrow keys move between the numbers.";
  cells.setAttribute("aria-label", `${label}. ${keys}`);
  const readout = el("p", { class: "readout", role: "status" });
  const grid = { element: el("div", { class: "number-grid" }, [cells, readout]), rows: [], cursor: [0, 0] };

  grid.draw = (rows, { largest = largestOf(rows), column = null } = {}) => {
    Object.assign(grid, { rows, cursor: [0, column ?? 0] });
    cells.replaceChildren(...rows.map((row, i) => gridRow(row, i, largest, column)));
    readout.textContent = rangeText(rows);
  };
  const moveTo = (row, column) => {
    cells.querySelector(".cursor")?.classList.remove("cursor");
    grid.cursor = [row, column];
    cells.querySelector(`[data-cell="${row},${column}"]`)?.classList.add("cursor");
    readout.textContent = describe(row, column, grid.rows[row].values[column]);
  };
  const cellOf = (event) => event.target.dataset?.cell?.split(",").map(Number);
  cells.addEventListener("pointermove", (event) => { const cell = cellOf(event); if (cell) moveTo(...cell); });
  cells.addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (!cell) return;
    moveTo(...cell);
    pick?.(cell[1]);
  });
  cells.addEventListener("focus", () => cells.matches(":focus-visible") && grid.rows.length && moveTo(...grid.cursor));
  cells.addEventListener("keydown", (event) => {
    const [row, column] = grid.cursor;
    if (event.key === "Enter" && pick) return void pick(column);
    const to = movedCell(grid, event.key);
    if (!to) return;
    event.preventDefault();
    moveTo(...to);
  });
  return grid;
}

function movedCell({ rows, cursor: [row, column] }, key) {
  const moves = { ArrowRight: [row, column + 1], ArrowLeft: [row, column - 1], ArrowDown: [row + 1, column], ArrowUp: [row - 1, column] };
  moves.Home = [row, 0];
  moves.End = [row, (rows[row]?.values.length ?? 0) - 1];
  const to = moves[key];
  return to && rows[to[0]]?.values[to[1]] !== undefined ? to : null;
}

function gridRow({ name, values }, row, largest, column) {
  const rects = Array.from(values, (value, i) => svg("rect", {
    x: i, y: 0, width: 1, height: 1, "data-cell": `${row},${i}`, class: i === column ? "cell chosen" : "cell",
    style: { "--share": `${Math.round(100 * Math.min(1, Math.abs(value) / (largest || 1)) ** 0.7)}%`, "--end": value < 0 ? "var(--heat-negative)" : "var(--heat-high)" },
  }));
  const strip = svg("svg", { viewBox: `0 0 ${values.length} 1`, preserveAspectRatio: "none", "aria-hidden": "true", class: "cells", style: { "max-width": `${values.length * CELL_WIDTH}px` } }, rects);
  return el("div", { class: "grid-row" }, [name === undefined ? null : el("span", { class: "token", text: name }), strip]);
}

const largestOf = (rows) => rows.reduce((most, { values }) => values.reduce((m, x) => Math.max(m, Math.abs(x)), most), 0);

/** Describes all numbers, until a cell is chosen. */
function rangeText(rows) {
  const all = rows.flatMap(({ values }) => Array.from(values));
  if (!all.length) return "";
  const [low, high] = [Math.min(...all), Math.max(...all)].map((x) => shownNumber(x, 2));
  return `${all.length.toLocaleString("en")} numbers from ${low} to ${high}.`;
}
