// Functions of rows of numbers: products, norms, activations and softmax.

/** Computes x W + b for `num` rows of x, which start at row `first`. */
export function linear(x, first, num, map) {
  const { inputs, outputs, kernel, bias } = map;
  const out = new Float32Array(num * outputs);
  const sums = new Float64Array(outputs);
  for (let row = 0; row < num; row++) {
    if (bias) sums.set(bias); else sums.fill(0);
    const start = (first + row) * inputs;
    let i = 0;
    for (; i + 3 < inputs; i += 4) {
      const a = x[start + i], b = x[start + i + 1], c = x[start + i + 2], d = x[start + i + 3];
      const k0 = i * outputs, k1 = k0 + outputs, k2 = k1 + outputs, k3 = k2 + outputs;
      for (let o = 0; o < outputs; o++) {
        sums[o] += a * kernel[k0 + o] + b * kernel[k1 + o] + c * kernel[k2 + o] + d * kernel[k3 + o];
      }
    }
    for (; i < inputs; i++) {
      const a = x[start + i], k = i * outputs;
      for (let o = 0; o < outputs; o++) sums[o] += a * kernel[k + o];
    }
    out.set(sums, row * outputs);
  }
  return out;
}

/** Computes the products of one vector with the rows of a table. */
export function tableProducts(table, vector, dim) {
  const num = table.length / dim;
  const out = new Float32Array(num);
  for (let row = 0, at = 0; row < num; row++, at += dim) {
    let sum = 0;
    for (let i = 0; i < dim; i++) sum += table[at + i] * vector[i];
    out[row] = sum;
  }
  return out;
}

export function meanOf(x) {
  let sum = 0;
  for (const value of x) sum += value;
  return sum / x.length;
}

/** Returns the standard deviation of the population. */
export function deviationOf(x) {
  const mean = meanOf(x);
  let sum = 0;
  for (const value of x) sum += (value - mean) ** 2;
  return Math.sqrt(sum / x.length);
}

/** Normalizes `num` rows of `dim` numbers, as `functional.layers.norms`. */
export function normalizeRows(x, first, num, weights, config, dim = config.embed_dim) {
  const out = x.slice(first * dim, (first + num) * dim);
  if (config.norm === "none") return out;
  const centres = config.norm === "layer";
  const offset = config.norm === "rms_one_plus" ? 1 : 0;
  for (let row = 0; row < num; row++) {
    const part = out.subarray(row * dim, (row + 1) * dim);
    const mean = centres ? meanOf(part) : 0;
    let square = 0;
    for (let i = 0; i < dim; i++) square += (part[i] - mean) ** 2;
    const factor = 1 / Math.sqrt(square / dim + config.norm_epsilon);
    for (let i = 0; i < dim; i++) {
      const bias = centres && weights.bias ? weights.bias[i] : 0;
      part[i] = (part[i] - mean) * factor * (offset + weights.scale[i]) + bias;
    }
  }
  return out;
}

/** Computes the error function, with a relative error of about 1e-7 (Press et al., erfcc). */
function erf(x) {
  const z = Math.abs(x);
  const t = 1 / (1 + 0.5 * z);
  const c = [1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587,
    -0.82215223, 0.17087277];
  let sum = 0;
  for (let i = c.length - 1; i >= 0; i--) sum = sum * t + c[i];
  const rest = t * Math.exp(-z * z - 1.26551223 + t * sum);
  return x >= 0 ? 1 - rest : rest - 1;
}

const silu = (x) => x / (1 + Math.exp(-x));
const gelu = (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2));
const geluTanh = (x) =>
  0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));

export const PLAIN_ACTIVATIONS = {
  relu: (x) => Math.max(x, 0),
  gelu,
  gelu_tanh: geluTanh,
  silu,
  squared_relu: (x) => Math.max(x, 0) ** 2,
  sigmoid: (x) => 1 / (1 + Math.exp(-x)),
  tanh: Math.tanh,
};
export const GATED_ACTIVATIONS = { swiglu: silu, geglu: gelu, geglu_tanh: geluTanh };

export const softCap = (x, cap) => (cap === null ? x : cap * Math.tanh(x / cap));

/** Returns the logarithm of the sum of the exponentials. */
export function logSum(x) {
  let largest = -Infinity;
  for (const value of x) if (value > largest) largest = value;
  let sum = 0;
  for (const value of x) sum += Math.exp(value - largest);
  return largest + Math.log(sum);
}

/** Returns the indices of the `num` largest numbers, the largest first. */
export function largestIndices(x, num) {
  const best = [];
  for (let i = 0; i < x.length; i++) {
    if (best.length === num && x[i] <= x[best[num - 1]]) continue;
    let at = best.length;
    while (at > 0 && x[best[at - 1]] < x[i]) at--;
    best.splice(at, 0, i);
    if (best.length > num) best.pop();
  }
  return best;
}
