// The charts over time and the columns of batch sizes. They draw what they are given; the roofline has a file of its own.

import { linear, logarithmic, path, redraw, roundTicks, spread, svg } from "./draw.js";
import { duration, figure, joined, scaled, share } from "./format.js";
import { OPS } from "./ops.js";

const HEIGHT = 190;
const EDGE = { top: 12, right: 92, bottom: 22, left: 44 };
// A pause in the readings longer than this is a gap in the line.
const GAP_S = 7.5;

function timeScale(width, { now_s, range_s }) {
  return linear(now_s - range_s, now_s, EDGE.left, width - EDGE.right);
}

function timeAxis(width, height, { range_s }) {
  const x = linear(-range_s, 0, EDGE.left, width - EDGE.right);
  return [-range_s, -range_s / 2, 0].map((at) =>
    svg(
      "text",
      { class: "tick", x: x(at), y: height - 5, "text-anchor": at === 0 ? "end" : at === -range_s ? "start" : "middle" },
      at === 0 ? "now" : `${-at / 60} min`,
    ),
  );
}

function grid(width, ticks, y, write) {
  return ticks.flatMap((tick) => [
    svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }),
    svg("text", { class: "tick", x: EDGE.left - 7, y: y(tick) + 4, "text-anchor": "end" }, write(tick)),
  ]);
}

function endLabels(width, labels, bottom) {
  const x = width - EDGE.right + 9;
  return spread(labels, 15, EDGE.top + 2, bottom).map(({ y, text, kind }) =>
    svg("text", { class: `end ${kind}`, x, y: y + 4 }, text),
  );
}

function withGaps(seconds, point) {
  return seconds.flatMap((second, i) => {
    const isGap = i > 0 && second.time_s - seconds[i - 1].time_s > GAP_S;
    return isGap ? [null, point(second)] : [point(second)];
  });
}

const shownOf = (seconds, { now_s, range_s }) => seconds.filter(({ time_s }) => time_s >= now_s - range_s);

/** Requests per second, one op upon the other.
 *
 * @param span {now_s, range_s}: the end and the length of the time axis.
 */
export function drawRates(element, every, present, span) {
  const seconds = shownOf(every, span);
  redraw(element, HEIGHT, (width, height) => {
    const bottom = height - EDGE.bottom;
    const sums = seconds.map(({ rates }) => OPS.reduce((sum, op) => sum + (rates[op] ?? 0), 0));
    const ticks = roundTicks(Math.max(4, ...sums), 3);
    const x = timeScale(width, span);
    const y = linear(0, ticks.at(-1), bottom, EDGE.top);
    const shapes = [];
    const floor = seconds.map(() => 0);
    for (const op of OPS) {
      const before = [...floor];
      seconds.forEach(({ rates }, i) => (floor[i] += rates[op] ?? 0));
      if (!seconds.some(({ rates }) => rates[op] > 0)) continue;
      for (const [from, to] of stretches(seconds)) {
        const over = indices(from, to).map((i) => [x(seconds[i].time_s), y(floor[i])]);
        const under = indices(from, to).map((i) => [x(seconds[i].time_s), y(before[i])]);
        shapes.push(svg("path", { class: `area ${op}`, d: `${path([...over, ...under.reverse()])}Z` }));
        shapes.push(svg("path", { class: `line ${op}`, d: path(over) }));
      }
    }
    let below = 0;
    const labels = OPS.filter((op) => present.rates[op] > 0).map((op) => {
      const middle = below + present.rates[op] / 2;
      below += present.rates[op];
      return { y: y(Math.min(middle, ticks.at(-1))), text: `${op} ${joined(scaled(present.rates[op]))}`, kind: op };
    });
    return [
      ...grid(width, ticks, y, (tick) => joined(scaled(tick))),
      ...timeAxis(width, height, span),
      ...shapes,
      ...endLabels(width, labels, bottom),
    ];
  });
}

const indices = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);

/** Unbroken stretches of readings, as first and last index. */
function stretches(seconds) {
  const found = [];
  seconds.forEach((second, i) => {
    const isNew = i === 0 || second.time_s - seconds[i - 1].time_s > GAP_S;
    if (isNew) found.push([i, i]);
    else found.at(-1)[1] = i;
  });
  return found;
}

/** Three percentiles of the latency on a logarithmic axis. */
export function drawLatency(element, every, present, span) {
  const seconds = shownOf(every, span);
  redraw(element, HEIGHT, (width, height) => {
    const bottom = height - EDGE.bottom;
    const known = seconds.flatMap(({ latency }) => Object.values(latency)).filter((one) => one !== null && one > 0);
    const [from, to] = latencyBounds(known);
    const x = timeScale(width, span);
    const y = logarithmic(from, to, bottom, EDGE.top);
    const ticks = latencyTicks(from, to);
    const lines = ["p99", "p90", "p50"].map((name) =>
      svg("path", {
        class: `line ${name}`,
        d: path(
          withGaps(seconds, (second) => (second.latency[name] ? [x(second.time_s), y(second.latency[name])] : null)),
        ),
      }),
    );
    const labels = ["p50", "p90", "p99"]
      .filter((name) => present.latency[name])
      .map((name) => ({
        y: y(Math.max(from, present.latency[name])),
        text: `${name} ${joined(duration(present.latency[name]))}`,
        kind: name,
      }));
    return [
      ...grid(width, ticks, y, (tick) => joined(duration(tick))),
      ...timeAxis(width, height, span),
      ...lines,
      ...endLabels(width, labels, bottom),
    ];
  });
}

function latencyBounds(known) {
  if (known.length === 0) return [1e-4, 1e-1];
  const low = Math.min(...known) / 1.3;
  const high = Math.max(...known) * 1.3;
  return high / low < 10 ? [Math.sqrt(low * high) / 3.2, Math.sqrt(low * high) * 3.2] : [low, high];
}

function latencyTicks(from, to) {
  const steps = Math.log10(to / from) > 2.2 ? [1] : Math.log10(to / from) > 1.2 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power += 1) {
    ticks.push(...steps.map((step) => step * 10 ** power));
  }
  return ticks.filter((tick) => tick >= from && tick <= to);
}

/** What share of launches carried so many requests. */
export function drawBatches(element, batches) {
  const ops = OPS.filter((op) => op in (batches[0]?.counts ?? {}));
  redraw(element, HEIGHT, (width, height) => {
    const edge = { top: 20, right: 4, bottom: 22, left: 4 };
    const bottom = height - edge.bottom;
    const shown = batches.filter(({ upTo, counts }) => upTo !== Infinity || ops.some((op) => counts[op] > 0));
    const sum = shown.reduce((all, { counts }) => all + ops.reduce((own, op) => own + counts[op], 0), 0);
    const most = Math.max(0, ...shown.map(({ counts }) => ops.reduce((own, op) => own + counts[op], 0)));
    const step = (width - edge.left - edge.right) / Math.max(1, shown.length);
    const y = linear(0, Math.max(1, most), 0, bottom - edge.top);
    const shapes = [svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: bottom, y2: bottom })];
    if (sum === 0) {
      const where = { x: width / 2, y: (edge.top + bottom) / 2, "text-anchor": "middle" };
      shapes.push(svg("text", { class: "tick", ...where }, "No launches in the last minute"));
    }
    shown.forEach(({ upTo, counts }, i) => {
      const [left, thick] = [edge.left + i * step + step * 0.14, step * 0.72];
      const middle = left + thick / 2;
      let top = bottom;
      for (const op of ops) {
        if (counts[op] === 0 || sum === 0) continue;
        const size = Math.max(1, y(counts[op]));
        top -= size;
        shapes.push(svg("rect", { class: `column ${op}`, x: left, width: thick, y: top, height: size }));
      }
      const own = ops.reduce((all, op) => all + counts[op], 0);
      if (own > 0 && sum > 0) {
        const text = share(own / sum);
        shapes.push(svg("text", { class: "value", x: middle, y: top - 6, "text-anchor": "middle" }, text.replace(" %", "%")));
      }
      shapes.push(svg("text", { class: "tick", x: middle, y: height - 5, "text-anchor": "middle" }, bucketName(batches, i)));
    });
    return shapes;
  });
}

/** How many requests a bucket stands for, such as "5–8". */
export function bucketName(batches, i, isLong = false) {
  const { upTo } = batches[i];
  const above = i > 0 ? batches[i - 1].upTo : 0;
  if (upTo === Infinity) return `>${above}`;
  return isLong && upTo - above > 1 ? `${above + 1}–${upTo}` : figure(upTo);
}
