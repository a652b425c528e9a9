// The ops that a server has: in its own order, programs last. An op's place gives its colour and its mark.

import { svg } from "./draw.js";

const PROGRAM = "program";
// Those of the style sheet: `--op-0` and so on.
const NUM_COLOURS = 12;
// Corners and turn, in degrees; no corners for a circle.
const CIRCLE = [0, 0];
const MARKS = [CIRCLE, [4, 0], [4, 45], [3, -90], [3, 90], [6, 0], [5, -90], [8, 22.5], [5, 90], [3, 0], [3, 180], [6, 30]];
const colours = new CSSStyleSheet();
document.adoptedStyleSheets.push(colours);

export const OPS = [PROGRAM];

/** Takes the names of ops in their order; those that were known and are not among them come behind. */
export function learn(names) {
  const all = [...new Set([...names, ...OPS])].filter((op) => op !== PROGRAM);
  if (all.join() === OPS.slice(0, -1).join()) return;
  OPS.splice(0, OPS.length, ...all, PROGRAM);
  colours.replaceSync(all.map((op, i) => `.${op} { --op: var(--op-${i % NUM_COLOURS}); }`).join("\n"));
}

/** Those that have any of these counts; the first three while there are none. */
export function active(counts) {
  const found = OPS.filter((op) => counts[op] > 0);
  return found.length ? found : OPS.filter((op) => op in counts).slice(0, 3);
}

/** The mark of an op: each has a shape of its own beside its colour. */
export function mark(op, x, y, size, attributes = {}) {
  const [corners, turn] = op === PROGRAM ? CIRCLE : MARKS[OPS.indexOf(op) % MARKS.length] ?? CIRCLE;
  if (corners === 0) return svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: size, ...attributes });
  const r = size * 1.25;
  const points = Array.from({ length: corners }, (_, i) => {
    const angle = ((turn + (360 * i) / corners) * Math.PI) / 180;
    return `${(x + r * Math.cos(angle)).toFixed(1)},${(y + r * Math.sin(angle)).toFixed(1)}`;
  });
  return svg("polygon", { points: points.join(" "), ...attributes });
}
