// Reads Prometheus text, and works out what happened between two readings. Pure: no page, no clock, no network.

const labelsOfText = new Map();

/** Parses the text into families: name → label text → value. */
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const brace = line.indexOf("{");
    const end = brace < 0 ? line.indexOf(" ") : line.lastIndexOf("}") + 1;
    const name = line.slice(0, brace < 0 ? end : brace);
    const value = Number(line.slice(end).trim().split(" ")[0].replace("+Inf", "Infinity"));
    let family = families.get(name);
    if (family === undefined) families.set(name, (family = new Map()));
    family.set(brace < 0 ? "" : line.slice(brace, end), value);
  }
  return families;
}

/** The labels of a label text, as an object. */
export function labelsOf(text) {
  let labels = labelsOfText.get(text);
  if (labels === undefined) {
    labels = {};
    for (const [, name, value] of text.matchAll(/([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    labelsOfText.set(text, labels);
  }
  return labels;
}

/** Every sample of a name that has these labels: [labels, value]. */
export function samples(families, name, wanted = {}) {
  const found = [];
  for (const [text, value] of families.get(name) ?? []) {
    const labels = labelsOf(text);
    if (Object.entries(wanted).every(([label, one]) => labels[label] === one)) found.push([labels, value]);
  }
  return found;
}

/** The sum over those samples, or null when there is none. */
export function total(families, name, wanted = {}) {
  const found = samples(families, name, wanted);
  return found.length === 0 ? null : found.reduce((sum, [, value]) => sum + value, 0);
}

/** What was added since an older reading, by the values of some labels: [labels, increase]. */
export function increases(now, then, name, wanted = {}) {
  const before = then.get(name);
  const found = [];
  for (const [text, value] of now.get(name) ?? []) {
    const labels = labelsOf(text);
    if (!Object.entries(wanted).every(([label, one]) => labels[label] === one)) continue;
    found.push([labels, Math.max(0, value - (before?.get(text) ?? 0))]);
  }
  return found;
}

/** The sum of those increases. */
export function increase(now, then, name, wanted = {}) {
  return increases(now, then, name, wanted).reduce((sum, [, value]) => sum + value, 0);
}

/** A histogram's increase, bucket by bucket: [{upTo, count}] in rising order, counts not cumulative. */
export function buckets(now, then, name, wanted = {}) {
  const cumulative = new Map();
  for (const [labels, value] of increases(now, then, `${name}_bucket`, wanted)) {
    const upTo = labels.le === "+Inf" ? Infinity : Number(labels.le);
    cumulative.set(upTo, (cumulative.get(upTo) ?? 0) + value);
  }
  let below = 0;
  return [...cumulative]
    .sort(([a], [b]) => a - b)
    .map(([upTo, count]) => {
      const own = Math.max(0, count - below);
      below = count;
      return { upTo, count: own };
    });
}

/** A quantile as Prometheus estimates it: linear inside its bucket. Null when nothing was observed. */
export function quantile(q, histogram) {
  const observed = histogram.reduce((sum, { count }) => sum + count, 0);
  if (observed === 0) return null;
  let rest = q * observed;
  let from = 0;
  for (const { upTo, count } of histogram) {
    if (count > 0 && rest <= count) return upTo === Infinity ? from : from + (upTo - from) * (rest / count);
    rest -= count;
    if (upTo !== Infinity) from = upTo;
  }
  return from;
}

/** Whether a counter fell: another service answers now, and older readings say nothing of it. */
export function isAnother(now, then) {
  for (const name of ["tilewire_requests_total", "tilewire_flops_total"]) {
    if ((total(now, name) ?? 0) < (total(then, name) ?? 0)) return true;
  }
  return false;
}
