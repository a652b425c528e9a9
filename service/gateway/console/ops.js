// The ops: their order, which of them a server has computed, and the mark of each.

import { svg } from "./draw.js";

export const OPS = ["matmul", "softmax", "add", "normalize", "reduce", "pointwise", "topk", "search", "program"];
const FIRST = OPS.slice(0, 3);
// Corners and turn of each mark, in degrees; no corners for a circle.
const MARKS = {
  matmul: [0, 0],
  softmax: [4, 0],
  add: [4, 45],
  normalize: [3, -90],
  reduce: [3, 90],
  pointwise: [6, 0],
  topk: [5, -90],
  search: [8, 22.5],
  program: [0, 0],
};

/** Those that have any of these counts; the first three while there are none. */
export function active(counts) {
  const found = OPS.filter((op) => counts[op] > 0);
  return found.length ? found : FIRST;
}

/** The mark of an op: each has a shape of its own beside its colour. */
export function mark(op, x, y, size, attributes = {}) {
  const [corners, turn] = MARKS[op] ?? [0, 0];
  if (corners === 0) return svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: size, ...attributes });
  const r = size * 1.25;
  const points = Array.from({ length: corners }, (_, i) => {
    const angle = ((turn + (360 * i) / corners) * Math.PI) / 180;
    return `${(x + r * Math.cos(angle)).toFixed(1)},${(y + r * Math.sin(angle)).toFixed(1)}`;
  });
  return svg("polygon", { points: points.join(" "), ...attributes });
}
