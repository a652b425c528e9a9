// Numbers as people read them. Owns no state and touches no page.

const NONE = "–";
const SHORT_DTYPES = {
  bfloat16: "bf16",
  float16: "f16",
  float32: "f32",
  float64: "f64",
  float8_e4m3fn: "e4m3",
  float8_e5m2: "e5m2",
  int8: "i8",
  int32: "i32",
  int64: "i64",
  tf32: "tf32",
};

/** Whether a figure is there. */
export const isFigure = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits, without an exponent; thousands apart. */
export function figure(value, digits = 3) {
  if (!isFigure(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en-GB");
  return Number(value.toPrecision(digits)).toLocaleString("en-GB", { maximumFractionDigits: 9 });
}

/** A number of things, in the singular or the plural. */
export const counted = (count, noun) => `${figure(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A figure with a unit of thousands, such as "12.4 k". */
export function scaled(value, unit = "", digits = 3) {
  if (!isFigure(value)) return [NONE, ""];
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let step = 0;
  let rest = value;
  while (Math.abs(rest) >= 999.5 && step < prefixes.length - 1) {
    rest /= 1000;
    step += 1;
  }
  return [figure(rest, digits), prefixes[step] + unit];
}

/** TFLOP/s as a figure and a unit of its size. */
export const flops = (tflops) => scaled(isFigure(tflops) ? tflops * 1e12 : null, "FLOP/s");

/** Seconds as a figure and its unit: µs, ms or s. */
export function duration(seconds) {
  if (!isFigure(seconds)) return [NONE, ""];
  if (seconds < 999.5e-6) return [figure(seconds * 1e6), "µs"];
  if (seconds < 0.9995) return [figure(seconds * 1e3), "ms"];
  return [figure(seconds), "s"];
}

/** Bytes as a figure and its unit, in steps of 1024. */
export function bytes(count) {
  if (!isFigure(count)) return [NONE, ""];
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  let rest = count;
  while (rest >= 1000 && step < units.length - 1) {
    rest /= 1024;
    step += 1;
  }
  return [figure(rest), units[step]];
}

/** A share as whole per cent; what is small but there is not shown as nothing. */
export function share(part) {
  if (!isFigure(part)) return NONE;
  const percent = part * 100;
  if (percent > 0 && percent < 1) return "< 1 %";
  return `${Math.round(percent)} %`;
}

/** Joins a figure and its unit with a space that does not break. */
export const joined = ([value, unit]) => (unit ? `${value}\u00a0${unit}` : value);

/** A dtype in the few letters that fit a chart. */
export const shortDtype = (dtype) => SHORT_DTYPES[dtype] ?? dtype;

/** How long ago an ISO time was, in words. */
export function ago(iso, now_ms = Date.now()) {
  if (!iso) return "never";
  const seconds = Math.max(0, (now_ms - Date.parse(iso)) / 1000);
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

/** A time of day, to the second. */
export const clock = (time_ms) => new Date(time_ms).toLocaleTimeString("en-GB");
