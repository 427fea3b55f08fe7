// Functions of rows of numbers: products, norms, activations and softmax.

const PANEL = 4; // columns of a kernel that are multiplied together

/** Returns a linear map without its bias. Unlike a copy, it does not expand 8-bit weights. */
export const withoutBias = (map) => Object.create(map, { bias: { value: undefined } });

/**
 * Computes x W + b for `num` rows of x, which start at row `first`.
 *
 * Four columns of W at a time are copied to float64 numbers, which all rows then use. This is
 * faster than reading W for each row, and 8-bit weights need no float32 copy of W.
 */
export function linear(x, first, num, map) {
  const { inputs, outputs, bias } = map;
  const { codes, scales } = map.kernel_codes ?? { codes: map.kernel };
  const out = new Float32Array(num * outputs);
  const rows = Float64Array.from(x.subarray(first * inputs, (first + num) * inputs));
  const panel = new Float64Array(inputs * PANEL), sums = new Float64Array(2 * PANEL);
  for (let column = 0; column < outputs; column += PANEL) {
    const wide = Math.min(PANEL, outputs - column);
    fillPanel(panel, codes, inputs, outputs, column, wide);
    for (let row = 0; row < num; row += 2) {
      const two = Math.min(2, num - row);
      multiplyPanel(panel, rows, row * inputs, (row + two - 1) * inputs, inputs, sums);
      for (let r = 0; r < two; r++) {
        for (let t = 0; t < wide; t++) {
          const o = column + t, sum = sums[r * PANEL + t];
          out[(row + r) * outputs + o] = (scales ? sum * scales[o] : sum) + (bias ? bias[o] : 0);
        }
      }
    }
  }
  return out;
}

function fillPanel(panel, kernel, inputs, outputs, column, wide) {
  for (let i = 0, from = column; i < inputs; i++, from += outputs) {
    for (let t = 0; t < wide; t++) panel[i * PANEL + t] = kernel[from + t];
  }
}

/** Writes the products of two rows with the four columns of a panel to `sums`. */
function multiplyPanel(panel, rows, first, second, inputs, sums) {
  let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
  for (let i = 0, j = 0; i < inputs; i++, j += PANEL) {
    const a = rows[first + i], b = rows[second + i];
    const k0 = panel[j], k1 = panel[j + 1], k2 = panel[j + 2], k3 = panel[j + 3];
    a0 += a * k0; a1 += a * k1; a2 += a * k2; a3 += a * k3;
    b0 += b * k0; b1 += b * k1; b2 += b * k2; b3 += b * k3;
  }
  sums[0] = a0; sums[1] = a1; sums[2] = a2; sums[3] = a3;
  sums[4] = b0; sums[5] = b1; sums[6] = b2; sums[7] = b3;
}

/** Computes the products of one vector with the rows of a table, times a scale for each row. */
export function tableProducts(table, vector, dim, scales = null) {
  const num = table.length / dim;
  const out = new Float32Array(num);
  for (let row = 0, at = 0; row < num; row++, at += dim) {
    let sum = 0;
    for (let i = 0; i < dim; i++) sum += table[at + i] * vector[i];
    out[row] = scales ? sum * scales[row] : sum;
  }
  return out;
}

/** Computes Wᵀ y, the gradient at the input of x W for the gradient y at its output. */
export function transposedProduct(map, y) {
  const { inputs, outputs } = map;
  const { codes, scales } = map.kernel_codes ?? { codes: map.kernel };
  const scaledY = scales ? y.map((value, o) => value * scales[o]) : y;
  const out = new Float64Array(inputs);
  for (let i = 0, at = 0; i < inputs; i++, at += outputs) {
    let sum = 0;
    for (let o = 0; o < outputs; o++) sum += codes[at + o] * scaledY[o];
    out[i] = sum;
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
