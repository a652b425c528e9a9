// SVG by hand: elements, scales, ticks, labels that keep clear of one another. Knows no metric.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an SVG element with attributes, children and perhaps a text. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** Redraws a figure at its present width: one unit is one pixel, so that text keeps its size. */
export function redraw(figure, height, paint) {
  const canvas = figure.querySelector("svg");
  const width = Math.max(260, Math.floor(canvas.parentElement.clientWidth));
  canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
  canvas.setAttribute("height", height);
  canvas.replaceChildren(...paint(width, height));
}

/** A scale from values to pixels. */
export const linear = (from, to, start, end) => (value) => start + ((value - from) / (to - from)) * (end - start);

/** The same on a logarithmic axis. */
export function logarithmic(from, to, start, end) {
  const scale = linear(Math.log10(from), Math.log10(to), start, end);
  return (value) => scale(Math.log10(Math.max(value, from * 1e-3)));
}

/** The powers of ten from one bound to the other. */
export function decades(from, to) {
  const ticks = [];
  for (let power = Math.ceil(Math.log10(from) - 1e-9); power <= Math.log10(to) + 1e-9; power += 1) ticks.push(10 ** power);
  return ticks;
}

/** A round upper bound, and ticks up to it. */
export function roundTicks(highest, wanted = 4) {
  const rough = Math.max(highest, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const count = Math.max(1, Math.ceil(highest / step - 1e-9));
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}

/** A path through points; `null` lifts the pen. */
export function path(points) {
  let isDown = false;
  let text = "";
  for (const point of points) {
    if (point === null) {
      isDown = false;
    } else {
      text += `${isDown ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      isDown = true;
    }
  }
  return text;
}

/** Moves labels apart: each keeps at least `gap` to the next, none leaves the room. */
export function spread(labels, gap, top, bottom) {
  const sorted = [...labels].sort((a, b) => a.y - b.y);
  let next = top;
  for (const label of sorted) {
    label.y = Math.max(label.y, next);
    next = label.y + gap;
  }
  let limit = bottom;
  for (const label of sorted.reverse()) {
    label.y = Math.min(label.y, limit);
    limit = label.y - gap;
  }
  return labels;
}
