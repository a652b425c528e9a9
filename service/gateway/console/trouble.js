// What went wrong: refusals and failures by status and reason, the last of them by request id, and each API key's share.

import { ago, counted, figure, joined, scaled } from "./format.js";
import { byId, fillRows, make, write } from "./page.js";
import { refusal } from "./panels.js";

const MAX_FAILURES = 8;
const SERVER_ERROR = 500;

/** Sums of the intervals of the history, by what `field` has. */
export function sums(intervals, field) {
  const found = {};
  for (const interval of intervals) {
    for (const [name, count] of Object.entries(interval[field] ?? {})) found[name] = (found[name] ?? 0) + count;
  }
  return found;
}

/** Shows the history's answer: {status, body}. */
export function showTrouble({ status, body }) {
  if (status !== 200 || !body) {
    write(byId("trouble-note"), refusal(status));
    fillRows(byId("statuses").tBodies[0], [], "Not known.");
    fillRows(byId("failures").tBodies[0], [], "Not known.");
    return;
  }
  const statuses = sums(body.intervals, "statuses");
  const requests = Object.values(sums(body.intervals, "requests")).reduce((sum, one) => sum + one, 0);
  const bad = Object.values(statuses).reduce((sum, one) => sum + one, 0);
  const failed = Object.entries(statuses).reduce((sum, [code, one]) => sum + (Number(code) >= SERVER_ERROR ? one : 0), 0);
  byId("trouble").dataset.level = failed ? "bad" : bad ? "warn" : "good";
  const minutes = Math.max(1, Math.round((body.intervals.length * body.period_s) / 60));
  const span = minutes === 1 ? "the last minute" : `the last ${minutes} minutes`;
  const words = `${figure(bad)} of ${counted(requests, "request")} to ops refused or failed in ${span}`;
  write(byId("trouble-note"), bad ? words : `No request to an op was refused or failed in ${span}.`);
  showStatuses(statuses, sums(body.intervals, "refused"));
  showFailures(body.failures);
}

function showStatuses(statuses, refused) {
  const rows = [
    ...Object.entries(statuses).map(([code, count]) => [level(code), `status ${code}`, count]),
    ...Object.entries(refused).map(([reason, count]) => ["", reason.replaceAll("_", " "), count]),
  ];
  rows.sort((a, b) => b[2] - a[2]);
  byId("statuses").hidden = rows.length === 0;
  fillRows(
    byId("statuses").tBodies[0],
    rows.map(([kind, name, count]) => [make("span", kind, name), figure(count)]),
    "None.",
  );
}

const level = (code) => (Number(code) >= SERVER_ERROR ? "bad" : "warn");

function showFailures(failures) {
  const rows = failures
    .slice(0, MAX_FAILURES)
    .map((one) => [
      ago(new Date(one.time * 1000).toISOString()),
      make("span", level(one.status), String(one.status)),
      one.reason.replaceAll("_", " "),
      one.op ?? `${one.method} ${one.route || "elsewhere"}`,
      one.key ?? "–",
      make("code", "", one.request_id),
    ]);
  byId("failures-box").hidden = rows.length === 0;
  fillRows(byId("failures").tBodies[0], rows, "None.");
}

/** Shows each API key's requests of the last minute. */
export function showKeys(keys) {
  byId("keys-box").hidden = keys.length === 0;
  const rows = keys.map(({ key, rate, bad, bytesPerSecond }) => [
    key,
    joined(scaled(rate, "/s")),
    make("span", bad > 0 ? "warn" : "", joined(scaled(bad, "/s"))),
    joined(scaled(bytesPerSecond, "B/s")),
  ]);
  fillRows(byId("keys").tBodies[0], rows, "None.");
}
