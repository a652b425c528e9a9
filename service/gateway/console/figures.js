// What the page shows, worked out from readings of the metrics. Pure: it knows no page and no network.

import { buckets, increase, increases, isAnother, quantile, samples, total } from "./exposition.js";
import { OPS, learn } from "./ops.js";

export const STAGES = ["receive", "queue", "h2d", "kernel", "d2h", "send"];
export const HISTORY_S = 600;
const WINDOW_S = 5;
const BATCH_WINDOW_S = 60;
// The page's own readings in full: older ones are points of a line only.
const READINGS_S = 120;

/** Readings of the last minutes, and what followed from each; before the first one, what the server kept. */
export class History {
  constructor() {
    this.readings = [];
    this.seconds = [];
  }

  /** Takes a reading; returns the present figures. */
  add(time_s, families) {
    const last = this.readings.at(-1);
    if (last !== undefined && (isAnother(families, last.families) || time_s - last.time_s > HISTORY_S)) {
      this.readings = [];
      this.seconds = [];
    }
    this.readings.push({ time_s, families });
    // A key may read the metrics and not which ops there are.
    learn([...OPS, ...samples(families, "tilewire_requests_total").map(([{ op }]) => op)]);
    while (this.readings[0].time_s < time_s - READINGS_S - 1) this.readings.shift();
    const present = figures(this.now, this.before(WINDOW_S));
    if (this.readings.length > 1) {
      const { rates, points } = figures(this.now, this.readings.at(-2));
      this.seconds.push({ time_s, rates, points, latency: present.latency });
      while (this.seconds[0].time_s < time_s - HISTORY_S) this.seconds.shift();
    }
    const minute = this.before(BATCH_WINDOW_S);
    const { keys: ofMinute } = figures(this.now, minute);
    return { ...present, keys: ofMinute, batches: batches(this.now, minute) };
  }

  /** Takes the server's intervals for the time before the first reading.
   *
   * @param intervals From `/v1/history`.
   * @param shift_s What is added to Unix time for the time of readings.
   */
  prepend(intervals, shift_s) {
    const first_s = this.seconds.find(({ isKept }) => !isKept)?.time_s ?? Infinity;
    const kept = intervals
      .map((one) => ({ ...one, time_s: one.end + shift_s }))
      .filter(({ time_s, seconds }) => time_s < first_s && seconds > 0)
      .map(({ time_s, seconds, requests = {}, latency = {} }) => ({
        isKept: true,
        time_s,
        rates: Object.fromEntries(OPS.map((op) => [op, (requests[op] ?? 0) / seconds])),
        points: [],
        latency: { p50: latency.p50 ?? null, p90: latency.p90 ?? null, p99: latency.p99 ?? null },
      }));
    this.seconds = [...kept, ...this.seconds.filter(({ isKept }) => !isKept)];
  }

  get now() {
    return this.readings.at(-1);
  }

  /** The reading nearest to so many seconds ago. */
  before(seconds) {
    const wanted = this.now.time_s - seconds - 0.5;
    return this.readings.find(({ time_s }) => time_s >= wanted);
  }
}

function figures(now, then) {
  const seconds = now.time_s - then.time_s;
  const [at, from] = [now.families, then.families];
  const isReady = seconds > 0;
  const rate = (name, wanted) => (isReady ? increase(at, from, name, wanted) / seconds : null);
  const rates = Object.fromEntries(OPS.map((op) => [op, rate("tilewire_requests_total", { op })]));
  return {
    isReady,
    rates,
    requestsPerSecond: rate("tilewire_requests_total"),
    errorsPerSecond: isReady ? failures(at, from) / seconds : null,
    latency: latency(at, from, {}),
    latencyByOp: Object.fromEntries(OPS.map((op) => [op, latency(at, from, { op })])),
    points: isReady ? points(at, from) : [],
    product: product(at, from),
    busy: isReady ? increase(at, from, "tilewire_kernel_seconds_total") / seconds / Math.max(1, engines(at)) : null,
    meanBatch: ratio(increase(at, from, "tilewire_batch_requests_sum"), increase(at, from, "tilewire_batch_requests_count")),
    stages: Object.fromEntries(OPS.map((op) => [op, stages(at, from, op)])),
    gauges: gauges(at),
    counts: Object.fromEntries(OPS.map((op) => [op, total(at, "tilewire_requests_total", { op }) ?? 0])),
    keys: isReady ? keys(at, from, seconds) : [],
  };
}

/** Requests of each API key, by the second. */
function keys(at, from, seconds) {
  const found = {};
  for (const [{ key, code }, count] of increases(at, from, "tilewire_key_requests_total")) {
    const own = (found[key] ??= { key, rate: 0, bad: 0, bytesPerSecond: 0 });
    own.rate += count / seconds;
    if (Number(code) >= 400) own.bad += count / seconds;
  }
  for (const [{ key }, count] of increases(at, from, "tilewire_key_bytes_total")) {
    if (found[key]) found[key].bytesPerSecond += count / seconds;
  }
  return Object.values(found).sort((a, b) => b.bad - a.bad || b.rate - a.rate);
}

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

const engines = (at) => samples(at, "tilewire_engine_up").length;

const failures = (at, from) =>
  increases(at, from, "tilewire_requests_total").reduce((sum, [{ code }, n]) => sum + (Number(code) >= 400 ? n : 0), 0);

function latency(at, from, wanted) {
  const histogram = buckets(at, from, "tilewire_request_duration_seconds", wanted);
  return { p50: quantile(0.5, histogram), p90: quantile(0.9, histogram), p99: quantile(0.99, histogram) };
}

/** One point of the roofline for each op and dtype that ran. */
function points(at, from) {
  const found = [];
  for (const [{ op, dtype }, kernel_s] of increases(at, from, "tilewire_kernel_seconds_total")) {
    const flops = increase(at, from, "tilewire_flops_total", { op, dtype });
    const moved = increase(at, from, "tilewire_kernel_bytes_total", { op, dtype });
    if (kernel_s <= 0 || flops <= 0 || moved <= 0) continue;
    found.push({ op, dtype, intensity: flops / moved, tflops: flops / kernel_s / 1e12, bandwidth: moved / kernel_s });
  }
  return found.sort((a, b) => OPS.indexOf(a.op) - OPS.indexOf(b.op) || a.dtype.localeCompare(b.dtype));
}

function product(at, from) {
  const flops = increase(at, from, "tilewire_flops_total", { op: "matmul" });
  const kernel_s = increase(at, from, "tilewire_kernel_seconds_total", { op: "matmul" });
  return { tflops: kernel_s > 0 ? flops / kernel_s / 1e12 : null };
}

function stages(at, from, op) {
  const name = "tilewire_stage_duration_seconds";
  return Object.fromEntries(
    STAGES.map((stage) => [
      stage,
      ratio(increase(at, from, `${name}_sum`, { op, stage }), increase(at, from, `${name}_count`, { op, stage })),
    ]),
  );
}

/** Launches by how many requests shared them: [{upTo, counts: {op: n}}]. */
function batches(now, then) {
  const [at, from] = [now.families, then.families];
  const byOp = OPS.map((op) => buckets(at, from, "tilewire_batch_requests", { op }));
  const bounds = [...new Set(byOp.flat().map(({ upTo }) => upTo))].sort((a, b) => a - b);
  return bounds.map((upTo) => ({
    upTo,
    counts: Object.fromEntries(
      OPS.map((op, i) => [op, byOp[i].find((bucket) => bucket.upTo === upTo)?.count ?? 0]),
    ),
  }));
}

function gauges(at) {
  const byDevice = (name, wanted) =>
    Object.fromEntries(samples(at, name, wanted).map(([{ device }, value]) => [device, value]));
  return {
    inFlight: total(at, "tilewire_in_flight_requests"),
    queued: total(at, "tilewire_queue_depth"),
    arenaUsed: total(at, "tilewire_arena_bytes", { state: "used" }),
    arenaFree: total(at, "tilewire_arena_bytes", { state: "free" }),
    residents: total(at, "tilewire_resident_tensors"),
    residentBytes: total(at, "tilewire_resident_bytes"),
    servingCompiles: total(at, "tilewire_kernel_compiles_total", { phase: "serving" }),
    up: byDevice("tilewire_engine_up"),
    restarts: byDevice("tilewire_engine_restarts_total"),
    memoryByState: samples(at, "tilewire_device_memory_bytes"),
    power: byDevice("tilewire_device_power_watts"),
    temperature: byDevice("tilewire_device_temperature_celsius"),
    utilization: byDevice("tilewire_device_utilization_ratio"),
    build: samples(at, "tilewire_build_info").map(([labels]) => labels),
  };
}

/** The attainable TFLOP/s at an intensity, under a device's roofline; null where it is not known for the dtype. */
export function roofAt(roofline, dtype, intensity) {
  if (!roofline) return null;
  const slope = (roofline.bandwidth_bytes_per_second * intensity) / 1e12;
  const ceilings = roofline.tflops ?? {};
  if (dtype in ceilings) return Math.min(slope, ceilings[dtype]);
  // Without a ceiling of its own, what lies under all the others is bound by the memory alone.
  return slope < Math.min(...Object.values(ceilings)) ? slope : null;
}
