// Reads the packed arrays of the page's JSON: base64 of compressed bytes.

const ARRAY_TYPES = {
  uint8: Uint8Array, int8: Int8Array, int32: Int32Array, float16: Uint16Array, float32: Float32Array,
};

/**
 * Returns `value` with every packed array replaced by {shape, data}, at any depth. An 8-bit array
 * becomes {shape, codes, scales, axis}, because its float32 numbers need four times the memory.
 */
export async function unpackAll(value) {
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) {
    return typeof value[0] === "object" ? Promise.all(value.map(unpackAll)) : value;
  }
  if (typeof value.data === "string" && value.type in ARRAY_TYPES) return unpackArray(value);
  const names = Object.keys(value);
  const parts = await Promise.all(names.map((name) => unpackAll(value[name])));
  return Object.fromEntries(names.map((name, i) => [name, parts[i]]));
}

async function unpackArray(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const buffer = await inflate(bytes);
  const raw = new ARRAY_TYPES[packed.type](buffer);
  if (packed.type === "float16") return { shape: packed.shape, data: fromHalf(raw) };
  if (!packed.scales) return { shape: packed.shape, data: raw };
  const { data: scales } = await unpackArray(packed.scales);
  return { shape: packed.shape, codes: raw, scales, axis: packed.axis };
}

/** Unpacks texts from bytes. Each text ends with the byte 255, which UTF-8 never contains. */
export function unpackTexts(bytes) {
  const reader = new TextDecoder("utf-8", { ignoreBOM: true }), texts = [];
  for (let start = 0, end; start < bytes.length; start = end + 1) {
    end = bytes.indexOf(255, start);
    texts.push(reader.decode(bytes.subarray(start, end)));
  }
  return texts;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Multiplies codes by scales, which have size 1 along `axis`. */
export function scaled(codes, shape, scales, axis) {
  const inner = shape.slice(axis + 1).reduce((a, b) => a * b, 1);
  const size = shape[axis];
  return Float32Array.from(codes, (code, i) => {
    const outer = Math.floor(i / (inner * size));
    return Math.fround(code * scales[outer * inner + (i % inner)]);
  });
}

/** Converts the bits of float16 numbers to float32 numbers. */
function fromHalf(bits) {
  const out = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const sign = bits[i] & 0x8000 ? -1 : 1;
    const exponent = (bits[i] >> 10) & 31;
    const fraction = bits[i] & 1023;
    if (exponent === 0) out[i] = sign * fraction * 2 ** -24;
    else out[i] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return out;
}
