// The page's clock: asks for figures each second, keeps the history, tells the panels, and says when no figures come.

import { drawBatches, drawLatency, drawRates } from "./charts.js";
import { parse } from "./exposition.js";
import { History } from "./figures.js";
import { clock, joined, scaled, share } from "./format.js";
import { byId, watchScrolling, write } from "./page.js";
import { apiKey, ask, askJson, every, keepApiKey } from "./poll.js";
import { readResidents, startResidents } from "./residents.js";
import * as panels from "./panels.js";
import { drawRoofline } from "./roofline.js";
import { showKeys, showTrouble } from "./trouble.js";
import { readOps, readTargets, startWorkbench } from "./workbench.js";

const STALE_S = 3;
// The list of kernels is long and changes with an engine only.
const KERNELS_MS = 300_000;
const history = new History();
const seen = {
  present: null,
  readAt_ms: null,
  firstAsked_ms: Date.now(),
  metricsStatus: 0,
  readiness: null,
  engines: [],
  kernels: { status: 0, body: null },
};

// ── readings: each returns the status of its answer ──

async function readMetrics() {
  const { status, text } = await ask("metrics", "text/plain");
  seen.metricsStatus = status;
  if (status === 200) {
    seen.readAt_ms = Date.now();
    seen.present = history.add(performance.now() / 1000, parse(text));
    showFigures();
  }
  showState();
  return status;
}

async function readHistory() {
  const answer = await askJson("v1/history");
  showTrouble(answer);
  // Readings are on the page's own clock.
  const shift_s = performance.now() / 1000 - Date.now() / 1000;
  if (answer.status === 200 && answer.body) history.prepend(answer.body.intervals, shift_s);
  return answer.status;
}

async function readReadiness() {
  seen.readiness = await askJson("v2/health/ready");
  showState();
  return seen.readiness.status;
}

async function readEngines() {
  const { status, body } = await askJson("v2");
  if (status === 200 && body) {
    seen.engines = body.engines ?? [];
    showIdentity(body);
  }
  return status;
}

async function readKernels() {
  seen.kernels = await askJson("v1/kernels");
  showKernels();
  showFigures();
  return seen.kernels.status;
}

// ── what is shown ──

const roofline = () => seen.kernels.body?.devices?.find((one) => one.roofline)?.roofline ?? null;

function showFigures() {
  const { present } = seen;
  if (present === null) return;
  panels.showNow(present);
  panels.showPoints(present.points, roofline());
  panels.showLatency(present);
  panels.showBatches(present.batches);
  panels.showStages(present.stages, present.counts);
  panels.showLegend(present.counts);
  showKeys(present.keys);
  panels.showMemory(present.gauges);
  draw();
  const failed = present.errorsPerSecond;
  write(byId("errors-note"), failed ? `${joined(scaled(failed))} of them refused or failed` : "");
  write(byId("f-flops-sub"), roofWords(present));
}

function draw() {
  const { present } = seen;
  if (present === null) return;
  const { seconds } = history;
  const now_s = history.now.time_s;
  const span = { now_s, range_s: range_s() };
  drawRates(byId("rates"), seconds, present, span);
  drawLatency(byId("latency"), seconds, present, span);
  drawBatches(byId("batches"), present.batches);
  drawRoofline(byId("roofline"), roofline(), seconds, present.points, now_s);
}

/** How near the products come to what the device can do; the nearest dtype speaks. */
function roofWords({ points }) {
  const parts = points
    .filter(({ op }) => op === "matmul")
    .map((point) => point.tflops / panels.roofOf(point, roofline()))
    .filter(Number.isFinite);
  return parts.length ? `${share(Math.max(...parts))} of the roof` : "";
}

function showKernels() {
  panels.showKernels(seen.kernels, byId("kernel-filter").value, seen.present?.gauges.servingCompiles);
  const has = roofline() !== null;
  byId("roofline").hidden = byId("legend").hidden = !has;
  write(byId("h-roofline"), has ? "Roofline" : "Kernels' work");
  const name = seen.kernels.body?.devices?.find((one) => one.roofline)?.device_name;
  write(byId("roofline-note"), has ? name ?? "" : "no roofline: this device has no measured ceilings");
}

function showIdentity(server) {
  const names = [...new Set(seen.engines.map((one) => (one.device_name === one.device ? one.device : `${one.device_name}`)))];
  const backend = { cpu: "PyTorch on the CPU", gpu: "Triton" }[seen.engines[0]?.backend] ?? "";
  const count = seen.engines.length > 1 ? `${seen.engines.length} × ` : "";
  const words = [names.length ? count + names.join(", ") : "", backend, server.version ? `version ${server.version}` : ""];
  write(byId("identity"), words.filter(Boolean).join(" · "));
}

/** State of the service and of the readings: what is wrong, in one place. */
function showState() {
  const [state, text] = stateNow();
  const age_s = (Date.now() - (seen.readAt_ms ?? seen.firstAsked_ms)) / 1000;
  const isStale = age_s > STALE_S;
  document.body.classList.toggle("is-stale", isStale && seen.readAt_ms !== null);
  if (byId("state").dataset.state !== state) {
    byId("state").dataset.state = state;
    write(byId("said"), text);
  }
  write(byId("state-text"), text);
  const notice = noticeNow(isStale);
  byId("notice").hidden = notice === "";
  if (byId("notice").textContent !== notice) {
    byId("notice").textContent = notice;
    if (notice) write(byId("said"), notice);
  }
  write(byId("reading"), seen.readAt_ms ? `Figures of ${clock(seen.readAt_ms)}, read each second while this page is in view.` : "No reading yet.");
  panels.showEngines(seen.engines, seen.present?.gauges, seen.readiness?.body?.engines ?? []);
}

function stateNow() {
  if (seen.readiness === null) return ["connecting", "Connecting"];
  const { status, body } = seen.readiness;
  if (status === 0) return ["silent", "No answer"];
  if (status === 200) return ["ready", "Ready"];
  if (body?.error === "draining") return ["draining", "Draining"];
  const warming = (body?.engines ?? []).find((one) => one.total > 0);
  if (warming) return ["warming", `Warming up · ${panels.warmingText({ ...warming, state: warming.device })}`];
  return body?.engines?.length ? ["warming", "Starting"] : ["down", "No engine is ready"];
}

function noticeNow(isStale) {
  const status = seen.metricsStatus;
  const since = seen.readAt_ms ? ` The figures are those of ${clock(seen.readAt_ms)}.` : "";
  if (status === 401) {
    return apiKey() ? `The server does not know this API key.${since}` : `This server asks for an API key: enter it at “API key” above.${since}`;
  }
  if (status === 403) return `This API key may not read the metrics.${since}`;
  if (status === 404) return "This server does not offer its metrics here: the live figures stay empty. The form below works.";
  if (!isStale) return "";
  return status === 0 ? `The server does not answer.${since}` : `The metrics answered ${status}.${since}`;
}

// ── the user's key, the filter, the width ──

function startKey(refresh) {
  const [toggle, panel] = [byId("key-toggle"), byId("key-panel")];
  const open = (isOpen) => {
    panel.hidden = !isOpen;
    toggle.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("key").focus();
    else toggle.focus();
  };
  toggle.addEventListener("click", () => open(panel.hidden));
  panel.addEventListener("keydown", (event) => event.key === "Escape" && open(false));
  panel.addEventListener("submit", (event) => {
    event.preventDefault();
    keepApiKey(byId("key").value.trim());
    byId("key").value = "";
    open(false);
    refresh();
  });
  byId("key-forget").addEventListener("click", () => {
    keepApiKey("");
    open(false);
    refresh();
  });
}

/** The length of the time axes: the address keeps it, so that a link shows the same view. */
const range_s = () => (location.hash === "#range=10" ? 600 : 120);

function startRange() {
  const field = byId("range");
  const follow = () => {
    field.value = String(range_s());
    draw();
  };
  field.addEventListener("change", () => {
    location.hash = field.value === "600" ? "range=10" : "range=2";
  });
  addEventListener("hashchange", follow);
  follow();
}

async function start() {
  let polls = [];
  startWorkbench();
  startResidents();
  startRange();
  watchScrolling();
  startKey(() => polls.forEach((now) => now()));
  byId("kernel-filter").addEventListener("input", showKernels);
  new ResizeObserver(draw).observe(byId("main"));
  // The figures are by op.
  await readOps();
  polls = [
    every(1000, readMetrics),
    every(1000, readReadiness),
    every(5000, readEngines),
    every(5000, readHistory),
    every(3000, readResidents),
    every(15000, readTargets, 1000),
    every(KERNELS_MS, readKernels, 15000),
  ];
}

start();
