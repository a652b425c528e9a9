// The roofline: TFLOP/s over arithmetic intensity, both logarithmic, with what the device can do and what launches did.

import { decades, logarithmic, path, redraw, spread, svg } from "./draw.js";
import { figure, flops, joined, scaled, shortDtype } from "./format.js";
import { roofAt } from "./figures.js";
import { mark } from "./ops.js";

const TRAIL_S = 60;
const WIDE = 560;

/** Draws it.
 *
 * @param element The figure.
 * @param roofline From `/v1/kernels`: bandwidth and TFLOP/s by dtype; null when none was measured.
 * @param seconds The history: each second's points.
 * @param present The latest points.
 * @param now_s When that is.
 */
export function drawRoofline(element, roofline, seconds, present, now_s) {
  redraw(element, element.clientWidth < WIDE ? 320 : 400, (width, height) => {
    const edge = { top: 30, right: roofline ? (width < WIDE ? 62 : 86) : 14, bottom: 42, left: 46 };
    const recent = seconds.filter(({ time_s }) => time_s > now_s - TRAIL_S);
    const every = [...recent.flatMap(({ points }) => points), ...present];
    const bounds = boundsOf(roofline, every);
    const plot = {
      ...bounds,
      edge,
      x: logarithmic(bounds.x0, bounds.x1, edge.left, width - edge.right),
      y: logarithmic(bounds.y0, bounds.y1, height - edge.bottom, edge.top),
      right: width - edge.right,
      bottom: height - edge.bottom,
    };
    return [
      ...axes(plot, width, height),
      ...(roofline ? roof(plot, roofline, new Set(every.map(({ dtype }) => dtype))) : []),
      ...trail(plot, recent, now_s),
      ...latest(plot, present, roofline, width),
      ...(every.length ? [] : [emptyText(plot)]),
    ];
  });
}

function boundsOf(roofline, points) {
  const xs = points.map(({ intensity }) => intensity);
  const ys = points.map(({ tflops }) => tflops);
  const peaks = Object.values(roofline?.tflops ?? {});
  const ridges = peaks.map((peak) => (peak * 1e12) / roofline.bandwidth_bytes_per_second);
  const y1 = peaks.length ? Math.max(...peaks) * 2 : 10 ** Math.ceil(Math.log10((ys.length ? Math.max(...ys) : 0.1) * 2));
  const low = Math.min(...ys, y1 / 1e4);
  return {
    x0: halfDecade(Math.min(0.1, ...xs) / 1.5),
    x1: Math.max(10 ** Math.ceil(Math.log10(Math.max(1000, ...xs))), 4 * Math.max(0, ...ridges)),
    y0: halfDecade(low / 1.5),
    y1,
  };
}

/** The next half power of ten below: bounds that do not move with every reading. */
const halfDecade = (value) => 10 ** (Math.floor(2 * Math.log10(value)) / 2);

function axes({ x0, x1, y0, y1, x, y, right, bottom, edge }, width, height) {
  const shapes = [];
  for (const tick of decades(x0, x1)) {
    shapes.push(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: edge.top, y2: bottom }));
    shapes.push(svg("text", { class: "tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" }, figure(tick, 1)));
  }
  for (const tick of decades(y0, y1)) {
    shapes.push(svg("line", { class: "grid", x1: edge.left, x2: right, y1: y(tick), y2: y(tick) }));
    shapes.push(svg("text", { class: "tick", x: edge.left - 7, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
  }
  shapes.push(svg("line", { class: "axis", x1: edge.left, x2: right, y1: bottom, y2: bottom }));
  shapes.push(svg("text", { class: "tick", x: 0, y: edge.top - 14 }, "FLOP/s"));
  shapes.push(
    svg("text", { class: "tick", x: (edge.left + right) / 2, y: height - 6, "text-anchor": "middle" }, "FLOP for each byte moved"),
  );
  return shapes;
}

const tickText = (tflops) => joined(scaled(tflops * 1e12, "", 1));

const emptyText = ({ edge, right, bottom }) =>
  svg("text", { class: "tick", x: (edge.left + right) / 2, y: (edge.top + bottom) / 2, "text-anchor": "middle" }, "No launches in the last minute");

/** The slope of the memory, and a ceiling for each dtype that was measured. */
function roof(plot, roofline, used) {
  const { x, y, x0, x1, y0, right, edge, bottom } = plot;
  const slope = roofline.bandwidth_bytes_per_second / 1e12;
  const peaks = Object.entries(roofline.tflops ?? {}).sort(([, a], [, b]) => b - a);
  const highest = peaks[0]?.[1] ?? plot.y1;
  const start = Math.max(x0, y0 / slope);
  const ridge = Math.min(x1, highest / slope);
  const corner = [x(ridge), y(slope * ridge)];
  const shapes = [
    svg("path", {
      class: "under",
      d: `${path([[x(start), y(slope * start)], corner, [right, y(highest)], [right, bottom], [x(start), bottom]])}Z`,
    }),
    svg("path", { class: "roof slope", d: path([[x(start), y(slope * start)], corner]) }),
    slopeText(plot, slope, start, ridge),
  ];
  const labels = [];
  for (const [dtype, peak] of peaks) {
    const kind = used.has(dtype) ? "used" : "unused";
    const knee = Math.min(x1, peak / slope);
    shapes.push(svg("path", { class: `roof ${kind}`, d: path([[x(knee), y(peak)], [right, y(peak)]]) }));
    labels.push({ y: y(peak), text: `${shortDtype(dtype)} ${joined(scaled(peak * 1e12))}`, kind });
  }
  for (const { y: at, text, kind } of spread(labels, 14, edge.top, bottom)) {
    shapes.push(svg("text", { class: `end roofname ${kind}`, x: right + 7, y: at + 4 }, text));
  }
  return shapes;
}

function slopeText({ x, y }, slope, start, ridge) {
  const middle = 10 ** (0.62 * Math.log10(start) + 0.38 * Math.log10(ridge));
  const angle = (Math.atan2(y(slope * ridge) - y(slope * start), x(ridge) - x(start)) * 180) / Math.PI;
  const [at, up] = [x(middle), y(slope * middle)];
  return svg(
    "text",
    { class: "tick", transform: `translate(${at} ${up}) rotate(${angle}) translate(0 -8)`, "text-anchor": "middle" },
    `memory ${joined(scaled(slope * 1e12, "B/s"))}`,
  );
}

/** The seconds before this one, the fainter the older. */
function trail({ x, y }, recent, now_s) {
  return recent.slice(0, -1).flatMap(({ time_s, points }) =>
    points.map(({ op, intensity, tflops }) =>
      mark(op, x(intensity), y(tflops), 2.5, {
        class: `point ${op}`,
        "fill-opacity": (0.08 + 0.34 * (1 - (now_s - time_s) / TRAIL_S)).toFixed(2),
      }),
    ),
  );
}

function latest({ x, y, edge, bottom, right }, present, roofline, width) {
  const shapes = present.map((point) => {
    const shape = mark(point.op, x(point.intensity), y(point.tflops), 5, { class: `point latest ${point.op}` });
    shape.append(svg("title", {}, sentence(point, roofline)));
    return shape;
  });
  const labels = present.map((point) => ({
    y: y(point.tflops),
    at: x(point.intensity),
    text: `${point.op} ${shortDtype(point.dtype)}`,
    kind: point.op,
  }));
  for (const { y: height, at, text, kind } of spread(labels, 14, edge.top + 4, bottom - 4)) {
    const isLeft = at > right - 90;
    const where = { x: isLeft ? at - 10 : at + 10, "text-anchor": isLeft ? "end" : "start" };
    shapes.push(svg("text", { class: `end halo ${kind}`, ...where, y: height + 4 }, text));
  }
  return shapes;
}

/** A point in words. */
export function sentence({ op, dtype, intensity, tflops, bandwidth }, roofline) {
  const roof = roofAt(roofline, dtype, intensity);
  const part = roof ? `, ${Math.round((tflops / roof) * 100)} % of the roof` : "";
  return `${op} ${dtype}: ${joined(flops(tflops))} at ${figure(intensity)} FLOP per byte, ${joined(scaled(bandwidth, "B/s"))}${part}`;
}
