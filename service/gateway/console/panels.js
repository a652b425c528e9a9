// The tables and meters: what the figures, the lists of tensors and kernels, and the engines' state look like.

import { bucketName } from "./charts.js";
import { STAGES, roofAt } from "./figures.js";
import { bytes, counted, duration, figure, flops, isFigure, joined, scaled, share } from "./format.js";
import { OPS, active, mark } from "./ops.js";
import { svg } from "./draw.js";
import { byId, fillBar, fillHead, fillRows, make, write, writeFigure } from "./page.js";

const MAX_KERNELS = 400;

/** An op's name with its mark, and perhaps more. */
function opName(op, more) {
  const name = make("span", `op ${op}`, markOf(op), op);
  if (more) name.append(make("span", "kind", more));
  return name;
}

function markOf(op) {
  return svg("svg", { class: "mark", viewBox: "0 0 12 12", "aria-hidden": "true" }, mark(op, 6, 6, 4.4));
}

/** The legend of the ops that a server has computed. */
export function showLegend(counts) {
  const ops = active(counts);
  const place = byId("legend");
  const shown = `${OPS.join()}: ${ops.join()}`;
  if (place.dataset.ops === shown) return;
  place.dataset.ops = shown;
  place.replaceChildren(...ops.map((op) => opName(op)), make("span", "aside", "a mark is one second of launches; the last minute fades"));
}

/** The strip of figures on top. */
export function showNow(present) {
  const { gauges, product } = present;
  writeFigure("f-rate", [scaled(present.requestsPerSecond)[0], `${scaled(present.requestsPerSecond)[1]} /s`]);
  byId("f-rate").dataset.level = present.errorsPerSecond ? "warn" : "";
  write(byId("f-rate-sub"), present.errorsPerSecond ? `${joined(scaled(present.errorsPerSecond))}\u00a0/s refused or failed` : "none failed");
  for (const name of ["p50", "p90", "p99"]) writeFigure(`f-${name}`, duration(present.latency[name]));
  writeFigure("f-flops", flops(product.tflops));
  writeFigure("f-busy", percent(present.busy));
  writeFigure("f-batch", [figure(present.meanBatch), ""]);
  writeFigure("f-load", [figure(gauges.inFlight), ""]);
  write(byId("f-load-sub"), isFigure(gauges.queued) ? `${figure(gauges.queued)} waiting in engines` : "");
  write(byId("f-batch-sub"), present.meanBatch === 1 ? "request in a launch" : "requests in a launch");
}

function percent(part) {
  const [value, unit] = share(part).split(/ (?=%)/);
  return [value, unit ?? ""];
}

/** The TFLOP/s that a point could have; NaN where that is not known. */
export const roofOf = ({ dtype, intensity }, roofline) => roofAt(roofline, dtype, intensity) ?? NaN;

/** The table under the roofline. */
export function showPoints(points, roofline) {
  const rows = points.map((point) => {
    const roof = roofAt(roofline, point.dtype, point.intensity);
    return [
      opName(point.op, point.dtype),
      joined(flops(point.tflops)),
      figure(point.intensity),
      joined(scaled(point.bandwidth, "B/s")),
      roof ? share(point.tflops / roof) : "–",
    ];
  });
  byId("points").classList.toggle("roofless", !roofline);
  fillRows(byId("points").tBodies[0], rows, "Nothing ran in the last five seconds.");
}

/** Latency and requests by op. */
export function showLatency(present) {
  const rows = active(present.counts).map((op) => [
    opName(op),
    joined(scaled(present.rates[op])),
    ...["p50", "p90", "p99"].map((name) => joined(duration(present.latencyByOp[op][name]))),
  ]);
  fillRows(byId("latency-table").tBodies[0], rows, "");
}

/** Launches by size. */
export function showBatches(batches) {
  const counts = Object.fromEntries(OPS.map((op) => [op, 0]));
  for (const bucket of batches) for (const [op, count] of Object.entries(bucket.counts)) counts[op] = (counts[op] ?? 0) + count;
  const ops = active(counts);
  fillHead(byId("batches-table"), "Requests", ops);
  const rows = batches.map((bucket, i) => [bucketName(batches, i, true), ...ops.map((op) => figure(bucket.counts[op]))]);
  fillRows(byId("batches-table").tBodies[0], rows, "No launch in the last minute.");
}

/** Where a request's time goes: a figure for each stage, and a bar against the longest of its op. */
export function showStages(stages, counts) {
  const ops = active(counts);
  fillHead(byId("stages"), "Stage", ops);
  const longest = Object.fromEntries(ops.map((op) => [op, Math.max(...Object.values(stages[op]).map((one) => one ?? 0))]));
  const rows = STAGES.map((stage) => [stage, ...ops.map((op) => stageCell(op, stages[op][stage], longest[op]))]);
  fillRows(byId("stages").tBodies[0], rows, "");
}

function stageCell(op, seconds, longest) {
  if (seconds === null) return "–";
  const bar = make("span", `bar ${op}`, make("span", ""));
  bar.setAttribute("aria-hidden", "true");
  fillBar(bar, longest > 0 ? seconds / longest : 0);
  return make("span", "cell", make("span", "", joined(duration(seconds))), bar);
}

/** Arena, residents, queue. */
export function showMemory({ arenaUsed, arenaFree, residents, residentBytes, queued }) {
  const whole = (arenaUsed ?? 0) + (arenaFree ?? 0);
  write(byId("m-arena"), whole ? `${joined(bytes(arenaUsed))} of ${joined(bytes(whole))}` : "–");
  fillBar(byId("b-arena"), whole ? arenaUsed / whole : 0);
  write(byId("m-residents"), residents ? `${figure(residents)}, ${joined(bytes(residentBytes))}` : residents === 0 ? "none" : "–");
  write(byId("m-queue"), isFigure(queued) ? counted(queued, "request") : "–");
}

/** One block for each engine: its device, its state, what its sensors say. */
export function showEngines(engines, gauges, starting) {
  const devices = new Set([...engines.map(({ device }) => device), ...Object.keys(gauges?.up ?? {})]);
  for (const { device } of starting) devices.add(device);
  const blocks = [...devices].sort().map((device) => engineBlock(device, engines, gauges ?? {}, starting));
  const place = byId("engines");
  const next = make("div", "", ...blocks);
  if (place.innerHTML !== next.innerHTML) place.replaceChildren(...blocks);
}

function engineBlock(device, engines, gauges, starting) {
  const known = engines.find((one) => one.device === device);
  const warming = starting.find((one) => one.device === device);
  const isUp = gauges.up?.[device] === 1;
  const restarts = gauges.restarts?.[device] ?? 0;
  const state = warming && !isUp ? warmingText(warming) : isUp ? "ready" : "not ready";
  const name = known && known.device_name !== device ? known.device_name : "";
  const block = make("div", isUp ? "engine" : "engine down", make("h3", "", [device, name].filter(Boolean).join(" · ")));
  const words = [state, counted(restarts, "restart")];
  if (known) words.push(`${known.backend}, torch ${known.torch}${known.triton === "none" ? "" : `, Triton ${known.triton}`}`);
  block.append(make("p", "", words.join(" · ")));
  const sensors = sensorWords(device, gauges);
  if (sensors) block.append(make("p", "", sensors));
  if (warming && !isUp && warming.total > 0) {
    const bar = make("progress", "");
    bar.max = warming.total;
    bar.value = warming.done;
    bar.setAttribute("aria-label", `Warm-up of ${device}`);
    block.append(bar);
  }
  return block;
}

/** Warm-up in words. */
export const warmingText = ({ state, stage, done, total }) =>
  [state ?? "warming", stage, total > 0 ? `${figure(done)} of ${figure(total)}` : ""].filter(Boolean).join(" · ");

function sensorWords(device, { memoryByState = [], power = {}, temperature = {}, utilization = {} }) {
  const memory = Object.fromEntries(
    memoryByState.filter(([labels]) => labels.device === device).map(([labels, value]) => [labels.state, value]),
  );
  const whole = memory.total ?? (isFigure(memory.used) && isFigure(memory.free) ? memory.used + memory.free : null);
  const words = [];
  if (isFigure(memory.used)) words.push(`${joined(bytes(memory.used))}${whole ? ` of ${joined(bytes(whole))}` : ""}`);
  if (isFigure(power[device])) words.push(`${figure(power[device])}\u00a0W`);
  if (isFigure(temperature[device])) words.push(`${figure(temperature[device])}\u00a0°C`);
  if (isFigure(utilization[device])) words.push(`${share(utilization[device])} used`);
  return words.join(" · ");
}

/** A status in a few words, for a list that could not be had. */
export function refusal(status) {
  if (status === 401) return "needs an API key";
  if (status === 403) return "not allowed with this API key";
  if (status === 404) return "not offered by this server";
  return status === 0 ? "no answer" : `answered ${status}`;
}

/** Loaded kernels; the filter's words must all occur. */
export function showKernels({ status, body }, filter, servingCompiles) {
  const place = byId("kernels").tBodies[0];
  const variants = (body?.devices ?? []).flatMap((device) => device.variants ?? []);
  byId("kernel-filter-field").hidden = variants.length === 0;
  if (status !== 200 || !body) {
    write(byId("kernels-note"), refusal(status));
    fillRows(place, [], "Not known.");
    return;
  }
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = variants
    .map((one) => [one.op, one.kernel, configText(one), one.source, figure(one.registers), figure(one.spills), joined(bytes(one.shared_bytes))])
    .filter((row) => words.every((word) => row.join(" ").toLowerCase().includes(word)));
  write(byId("kernels-note"), kernelSummary(body, variants, servingCompiles));
  fillRows(
    place,
    rows.slice(0, MAX_KERNELS).map(([op, ...rest]) => [opName(op), ...rest]),
    variants.length ? "None has these words." : "None: on this backend the products are PyTorch's own.",
  );
}

function configText({ config, signature }) {
  const parts = Object.entries(config ?? {}).map(([name, value]) => `${name.toLowerCase().replace("block_", "")} ${value}`);
  return parts.join(" · ") || signature || "–";
}

function kernelSummary({ devices }, variants, servingCompiles) {
  const tuned = variants.filter(({ source }) => source === "tuned").length;
  const spilling = variants.filter(({ spills }) => spills > 0).length;
  const words = [];
  if (variants.length) {
    words.push(`${figure(variants.length)} loaded`, `${figure(tuned)} tuned`, spilling ? `${figure(spilling)} spill` : "no spills");
  }
  const tables = [...new Set((devices ?? []).map(({ table }) => table).filter(Boolean))];
  if (tables.length) words.push(`table ${tables.join(", ")}`);
  if (isFigure(servingCompiles)) words.push(`${figure(servingCompiles)} compiled while serving`);
  return words.join(" · ");
}
