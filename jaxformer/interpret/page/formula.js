// Formulas as MathML elements.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const FORMULA_TAGS = { sub: "msub", sup: "msup", subsup: "msubsup", frac: "mfrac", sqrt: "msqrt", under: "munder" };

/**
 * Returns a formula. A part is a text or a list: ["sub", x, i], ["sup", x, n], ["frac", a, b],
 * ["sqrt", x], ["under", x, y], ["subsup", x, i, n], or a row of parts. Words, letters, numbers and
 * signs are told apart by their characters.
 */
export function formula(...parts) {
  const element = document.createElementNS(MATHML, "math");
  element.setAttribute("class", "formula-line");
  element.setAttribute("displaystyle", "true");
  element.append(...parts.map(formulaPart));
  return element;
}

function formulaPart(part) {
  if (typeof part === "string") return formulaText(part);
  const [first, ...rest] = part;
  const tag = typeof first === "string" ? FORMULA_TAGS[first] : undefined;
  const element = document.createElementNS(MATHML, tag ?? "mrow");
  element.append(...(tag ? rest : part).map(formulaPart));
  return element;
}

function formulaText(text) {
  const isNumber = /^[−-]?[\d.,]+%?$/.test(text);
  const tag = isNumber ? "mn" : /^\p{L}$/u.test(text) ? "mi" : /^[\p{L}\s]+$/u.test(text) ? "mtext" : "mo";
  const element = document.createElementNS(MATHML, tag);
  element.textContent = text;
  return element;
}

/** Returns a number with three decimals, or with an exponent if it is very small or large. */
export function shownNumber(x, digits = 3) {
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : String(x);
  const size = Math.abs(x);
  const isPlain = size === 0 || (size >= 0.5 * 10 ** -digits && size < 1e5);
  return (isPlain ? x.toFixed(digits) : x.toExponential(1)).replaceAll("-", "−");
}
