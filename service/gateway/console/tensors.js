// Tensors in the browser: matrices as people type them, safetensors and npy as the server sends them. Touches no page.

import { counted } from "./format.js";

const READERS = {
  F64: ["float64", 8, (view, at) => view.getFloat64(at, true)],
  F32: ["float32", 4, (view, at) => view.getFloat32(at, true)],
  F16: ["float16", 2, (view, at) => halfFloat(view.getUint16(at, true), 5, 10)],
  BF16: ["bfloat16", 2, (view, at) => bfloat16(view.getUint16(at, true))],
  I64: ["int64", 8, (view, at) => Number(view.getBigInt64(at, true))],
  I32: ["int32", 4, (view, at) => view.getInt32(at, true)],
  I8: ["int8", 1, (view, at) => view.getInt8(at)],
};

export const CONTENT_TYPES = {
  safetensors: "application/x-safetensors",
  npz: "application/x-npz",
  npy: "application/x-npy",
};

/** The content type of a file, by its name. */
export const contentTypeOf = (name) => CONTENT_TYPES[name.split(".").at(-1).toLowerCase()] ?? "application/octet-stream";

/** Reads a matrix from text: a row for each line, numbers apart by spaces, commas or tabs.
 *
 * @throws {Error} Whose message says what is wrong, and in which row.
 */
export function parseMatrix(text, name) {
  const lines = text
    .split(/[\n;]/)
    .map((line) => line.trim().replace(/^\[+|\]+,?$/g, ""))
    .filter((line) => line !== "");
  if (lines.length === 0) throw new Error(`${name} is empty. Type a row of numbers for each line.`);
  const rows = lines.map((line, i) =>
    line
      .split(/[\s,]+/)
      .filter((word) => word !== "")
      .map((word) => numberOf(word, `${name}, row ${i + 1}`)),
  );
  const odd = rows.findIndex((row) => row.length !== rows[0].length);
  if (odd > 0) {
    throw new Error(`${name}, row ${odd + 1} has ${counted(rows[odd].length, "number")}, but row 1 has ${rows[0].length}.`);
  }
  return rows;
}

function numberOf(word, where) {
  const special = { nan: "NaN", inf: "Infinity", "+inf": "Infinity", "-inf": "-Infinity" }[word.toLowerCase()];
  const value = Number(special ?? word);
  if (Number.isNaN(value) && special !== "NaN") throw new Error(`${where}: “${word.slice(0, 20)}” is not a number.`);
  return value;
}

/** Numbers as the server reads them in JSON: NaN and the infinities bare. Nested lists of any depth. */
export const textOf = (numbers) => (Array.isArray(numbers) ? `[${numbers.map(textOf).join(", ")}]` : String(numbers));

/** Reads a JSON answer, in which NaN and the infinities may stand bare: a tensor for each output. */
export function fromJson(text) {
  const strict = text.replace(/(?<![\w"])(-?Infinity|NaN)(?![\w"])/g, '"$1"');
  const { dtype, shape, ...outputs } = JSON.parse(strict);
  return Object.entries(outputs).map(([name, numbers]) => {
    const flat = [numbers].flat(Infinity).map(Number);
    const own = (one) => (typeof one === "object" && !Array.isArray(one) ? one[name] : one);
    return { name, dtype: own(dtype), shape: own(shape), count: flat.length, at: (i) => flat[i] };
  });
}

/** Reads the tensors of a safetensors file. */
export function fromSafetensors(buffer) {
  const view = new DataView(buffer);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  return Object.entries(header)
    .filter(([name]) => name !== "__metadata__")
    .map(([name, { dtype: code, shape, data_offsets: offsets }]) => {
      const count = shape.reduce((product, size) => product * size, 1);
      const reader = READERS[code];
      if (reader === undefined) return { name, dtype: code, shape, count, at: null };
      const [dtype, size, read] = reader;
      return { name, dtype, shape, count, at: (i) => read(view, 8 + length + offsets[0] + i * size) };
    });
}

function bfloat16(bits) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits << 16);
  return view.getFloat32(0);
}

function halfFloat(bits, exponentBits, fractionBits) {
  const sign = bits >> (exponentBits + fractionBits) ? -1 : 1;
  const exponent = (bits >> fractionBits) & (2 ** exponentBits - 1);
  const fraction = (bits & (2 ** fractionBits - 1)) / 2 ** fractionBits;
  const bias = 2 ** (exponentBits - 1) - 1;
  if (exponent === 2 ** exponentBits - 1) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** (1 - bias);
  return sign * (1 + fraction) * 2 ** (exponent - bias);
}

/** Reads `Server-Timing`: stage → milliseconds. */
export function timingsOf(header) {
  const stages = {};
  for (const [, stage, spent] of (header ?? "").matchAll(/([a-z0-9]+);dur=([\d.]+)/g)) stages[stage] = Number(spent);
  return stages;
}

/** A number of a result, short. */
export function element(value) {
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "∞");
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}
