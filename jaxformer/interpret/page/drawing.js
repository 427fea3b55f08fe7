// Draws the rows of `drawing_parts.js` as one picture, from the text at the top to the prediction.

import { el, svg } from "./dom.js";

const WIDE = 360, BOX_LEFT = 56, BOX_WIDE = 248, BOX_HIGH = 54, GAP = 16, PAIR_GAP = 8;
const CENTER = BOX_LEFT + BOX_WIDE / 2, BYPASS = 34, ENCODED = WIDE - 30;

/**
 * Returns {element, boxes}: the picture, and [{box, node}] of the parts.
 *
 * `open(box)` is called if a part is chosen, and `show(box)` if the pointer or the focus is on one.
 * `targetOf(box)` returns the name of the target that a part opens.
 * `stateText(state)` returns the text at the arrow after a state, or null.
 */
export function modelDrawing(rows, { label, targetOf, open, show, stateText }) {
  const pen = { y: 6, lines: [], boxes: [], above: null, ends: [CENTER], branch: null, frame: null, encoded: null };
  const actions = { targetOf, open, show };
  for (const row of rows) drawRow(pen, row, actions, stateText);
  const frames = pen.lines.filter((node) => node.classList.contains("layer-frame"));
  const others = pen.lines.filter((node) => !node.classList.contains("layer-frame"));
  const element = svg("svg", { class: "drawing", viewBox: `0 0 ${WIDE} ${pen.y + 6}`, role: "group", "aria-label": label },
    [svg("defs", {}, [arrowHead()]), ...frames, ...others, ...pen.boxes.map(({ node }) => node)]);
  return { element, boxes: pen.boxes };
}

const arrowHead = () => svg("marker", { id: "arrow-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
  [svg("path", { class: "arrow-tip", d: "M 0 0 L 8 4 L 0 8 z" })]);

const flow = (d, name = "flow", arrow = true) => svg("path", { class: name, d, "marker-end": arrow ? "url(#arrow-head)" : null });

function drawRow(pen, row, actions, stateText) {
  const draw = {
    heading: () => { pen.above = null; pen.y += 26; textAt(pen, BOX_LEFT, pen.y, row.text, "part-heading"); pen.y += 12; },
    box: () => drawBoxes(pen, [row.box], actions),
    pair: () => drawBoxes(pen, row.boxes, actions),
    stack: () => { drawSheets(pen, row.layers); drawBoxes(pen, [row.box], actions); pen.y += row.layers > 1 ? 6 : 0; pen.above = pen.y; },
    state: () => drawState(pen, row.prefix ? null : stateText(row.state)),
    open: () => { pen.side = row.prefix; pen.frame = pen.above + 10; pen.y = pen.frame + 34; textAt(pen, 22, pen.frame + 18, row.text, "layer-name"); },
    close: () => closeFrame(pen),
    branch: () => { pen.branch = Math.max(pen.y, pen.above + GAP) - 10; },
    sum: () => drawSum(pen),
    encoded: () => { pen.encoded = pen.above; },
  };
  draw[row.kind]();
}

function textAt(pen, x, y, text, name, anchor = "start") {
  pen.lines.push(svg("text", { x, y, text, class: name, "text-anchor": anchor }));
}

function drawBoxes(pen, boxes, actions) {
  const wide = (BOX_WIDE - PAIR_GAP * (boxes.length - 1)) / boxes.length;
  const from = pen.above;
  pen.y = from === null ? pen.y : Math.max(pen.y, from + GAP);
  const lefts = boxes.map((_, i) => BOX_LEFT + i * (wide + PAIR_GAP));
  if (from !== null) flowDown(pen, pen.ends, lefts.map((x) => x + wide / 2), from);
  boxes.forEach((box, i) => {
    const x = lefts[i];
    pen.boxes.push({ box, node: partNode(box, x, pen.y, wide, actions) });
    if (box.part === "cross_attention" && pen.encoded !== null) encodedArrow(pen);
  });
  pen.y += BOX_HIGH;
  pen.above = pen.y;
  pen.ends = lefts.map((x) => x + wide / 2);
}

/** Draws arrows from the columns `ends` at the height `from` to the columns `starts` at `pen.y`. */
function flowDown(pen, ends, starts, from) {
  const bend = starts.length > ends.length ? pen.y - 10 : from + 6;
  if (ends.length === starts.length) pen.lines.push(...starts.map((x) => flow(`M ${x} ${from} V ${pen.y - 1}`)));
  else if (ends.length > 1) pen.lines.push(...ends.map((x) => flow(`M ${x} ${from} V ${bend} H ${CENTER}`, "flow", false)), flow(`M ${CENTER} ${bend} V ${pen.y - 1}`));
  else pen.lines.push(flow(`M ${CENTER} ${from} V ${bend}`, "flow", false), ...starts.map((x) => flow(`M ${CENTER} ${bend} H ${x} V ${pen.y - 1}`)));
}

function encodedArrow(pen) {
  const y = pen.y + BOX_HIGH / 2;
  pen.lines.push(flow(`M ${CENTER} ${pen.encoded} v 8 H ${ENCODED} V ${y} H ${BOX_LEFT + BOX_WIDE + 1}`, "flow encoded"));
}

function drawState(pen, text) {
  const from = pen.above;
  pen.y = from + 24;
  pen.lines.push(flow(`M ${CENTER} ${from} V ${pen.y}`, "flow", false));
  if (text) textAt(pen, CENTER + 10, from + 16, text, "state-text");
  pen.above = pen.y;
}

/** Draws the edges of the sheets of a stack, at most three. */
function drawSheets(pen, layers) {
  const top = pen.above === null ? pen.y : Math.max(pen.y, pen.above + GAP);
  for (let sheet = Math.min(layers, 3) - 1; sheet > 0; sheet--) {
    pen.lines.push(svg("rect", { class: "sheet", x: BOX_LEFT + 4 * sheet, y: top + 3 * sheet, width: BOX_WIDE - 8 * sheet, height: BOX_HIGH, rx: 7 }));
  }
}

function closeFrame(pen) {
  pen.y = pen.above + 12;
  pen.lines.push(flow(`M ${CENTER} ${pen.above} V ${pen.y}`, "flow", false));
  pen.lines.push(svg("rect", { class: pen.side ? "layer-frame encoder" : "layer-frame decoder", x: 12, y: pen.frame, width: WIDE - 24, height: pen.y - pen.frame, rx: 10 }));
  pen.above = pen.y;
}

/** Draws the sum of a sub-layer's output and of its input, whose line bypasses the sub-layer. */
function drawSum(pen) {
  const from = pen.above, y = from + 22;
  pen.y = y - 8;
  flowDown(pen, pen.ends, [CENTER], from);
  pen.ends = [CENTER];
  pen.lines.push(
    flow(`M ${CENTER} ${pen.branch} H ${BYPASS} V ${y} H ${CENTER - 9}`, "flow bypass"),
    svg("circle", { class: "sum", cx: CENTER, cy: y, r: 8 }),
    svg("path", { class: "sum-sign", d: `M ${CENTER - 4} ${y} h 8 M ${CENTER} ${y - 4} v 8` }),
  );
  pen.y = y + 8;
  pen.above = pen.y;
}

function partNode(box, x, y, wide, { targetOf, open, show }) {
  const count = box.parameters ? box.parameters.toLocaleString("en") : "";
  const isNarrow = wide < BOX_WIDE;
  const texts = [
    svg("text", { class: "part-title", x: x + 10, y: y + 21, text: clipped(isNarrow ? box.short ?? box.title : box.title, isNarrow ? 13 : count ? 22 : 30) }),
    svg("text", { class: "part-sub", x: x + 10, y: y + 40, text: isNarrow ? count : clipped(box.sub, 38) }),
    count && !isNarrow ? svg("text", { class: "part-count", x: x + wide - 10, y: y + 21, "text-anchor": "end", text: count }) : null,
  ];
  const said = [box.title, box.sub, count ? `${count} parameters` : "no parameters", `Opens ${targetOf(box)}`].filter(Boolean).join(". ");
  const node = svg("g", {
    class: "part", "data-part": box.part, "data-id": box.id, "data-parameters": box.parameters,
    role: "button", tabindex: 0, "aria-label": `${said}.`,
  }, [svg("title", { text: `${said}.` }), svg("rect", { class: "part-box", x, y, width: wide, height: BOX_HIGH, rx: 7 }), ...texts]);
  for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => show(box));
  node.addEventListener("click", () => open(box));
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open(box);
  });
  return node;
}

const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Returns the text about a part, for the card beside the drawing. */
export function partAbout(box, total) {
  const share = box.parameters ? ` (${((100 * box.parameters) / total).toFixed(1)}% of all)` : "";
  return el("div", {}, [
    el("p", {}, [el("b", { text: box.title }), box.sub ? ` — ${box.sub}` : ""]),
    el("p", { text: box.about }),
    el("p", { class: "numbers", text: box.parameters ? `${box.parameters.toLocaleString("en")} parameters${share}.` : "This part has no parameters of its own." }),
  ]);
}
