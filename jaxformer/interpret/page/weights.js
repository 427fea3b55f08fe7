// The weights of the page as trees of arrays, one tree for each layer.
//
// 8-bit weights are stored as codes and scales in NAME_codes. The leaf NAME itself, as float32, is
// computed when it is read. `maths.js` multiplies the codes.

import { scaled } from "./arrays.js";

const MOST_EXPANDED = 4; // maximum number of 8-bit matrices whose float32 copies are kept
const expandedMatrices = new Map();

/** Returns {layers, ...parts}: the weights of a stack, whose paths begin with `prefix`. */
export function weightTrees(weights, numLayers, prefix = "") {
  const layers = Array.from({ length: numLayers }, () => ({}));
  const tree = {};
  for (const [path, array] of Object.entries(weights)) {
    if (!path.startsWith(prefix)) continue;
    const [part, ...names] = path.slice(prefix.length).split("/");
    if (part !== "blocks") putLeaf(tree, [part, ...names], array);
    else putInLayers(layers, names, array);
  }
  return { layers, ...tree };
}

/** Puts a slice of a stacked array into each layer of its group. */
function putInLayers(layers, names, array) {
  // Layers with different shapes are in groups, named after the first layer of each group.
  const isGroup = /^\d+$/.test(names[0]);
  const first = isGroup ? Number(names[0]) : 0;
  for (let i = 0; i < array.shape[0]; i++) {
    putLeaf(layers[first + i], isGroup ? names.slice(1) : names, layerSlice(array, i));
  }
}

function layerSlice({ shape, data, codes, scales, axis }, layer) {
  const rest = shape.slice(1);
  const part = (x) => x.subarray((layer * x.length) / shape[0], ((layer + 1) * x.length) / shape[0]);
  if (!codes) return { shape: rest, data: part(data) };
  return { shape: rest, codes: part(codes), scales: part(scales), axis: axis - 1 };
}

function putLeaf(tree, names, array) {
  let at = tree;
  for (const name of names.slice(0, -1)) at = at[name] ??= {};
  const name = names.at(-1);
  if (name === "kernel") [at.inputs, at.outputs] = array.shape;
  if (!array.codes) return void (at[name] = array.data);
  at[`${name}_codes`] = { codes: array.codes, scales: array.scales };
  Object.defineProperty(at, name, { get: () => expanded(array), enumerable: true });
}

/** Returns an 8-bit matrix as float32 numbers; only the latest few are kept. */
function expanded(array) {
  const found = expandedMatrices.get(array) ?? scaled(array.codes, array.shape, array.scales, array.axis);
  expandedMatrices.delete(array);
  expandedMatrices.set(array, found);
  if (expandedMatrices.size > MOST_EXPANDED) expandedMatrices.delete(expandedMatrices.keys().next().value);
  return found;
}

/** Makes `to` share the token vectors of `from` (an encoder shares its decoder's vectors). */
export function shareTokens(from, to) {
  for (const name of ["tokens", "tokens_codes"]) {
    const property = Object.getOwnPropertyDescriptor(from, name);
    if (property) Object.defineProperty(to, name, property);
  }
}
