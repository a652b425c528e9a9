// The form: sends any op or kept program, made from `openapi.json`, and shows the answer, its cost, or why it was refused.

import { bytes, counted, figure, joined } from "./format.js";
import { learn } from "./ops.js";
import { byId, make, save } from "./page.js";
import { askJson, withKey } from "./poll.js";
import { curlOf, pythonOf } from "./snippets.js";
import { contentTypeOf, CONTENT_TYPES, element, fromJson, fromSafetensors, parseMatrix, textOf, timingsOf } from "./tensors.js";

const MAX_SHOWN = 8;
const STAGES = ["receive", "queue", "h2d", "kernel", "d2h"];
const DTYPES = ["float32", "float16", "bfloat16", "int8"];
const NOT_OPTIONS = ["store", "durable", "timeout_ms"];
const SAMPLES = { matmul: { a: "1 2 3\n4 5 6", b: "7 8\n9 10\n11 12" } };
let targets = [];

/** Makes the form work. */
export function startWorkbench() {
  const form = byId("try");
  form.addEventListener("change", ({ target }) => {
    if (target.id === "op") showTarget();
    showSource();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  showSource();
}

/** Reads which ops there are, for the whole page: {status, ops}. */
export async function readOps() {
  const { status, body } = await askJson("openapi.json");
  const ops = Object.entries(body?.paths ?? {}).flatMap(([path, { post }]) => (post?.tags?.includes("ops") ? [opTarget(path, post, body)] : []));
  learn(ops.map(({ op }) => op));
  return { status, ops };
}

/** Reads which ops and programs there are; the choice stays. Returns the status of what failed, if anything did. */
export async function readTargets() {
  const { status, ops } = await readOps();
  const kept = await askJson("v1/programs");
  const programs = (Array.isArray(kept.body) ? kept.body : []).map(programTarget);
  const isNew = JSON.stringify([ops, programs]) !== JSON.stringify([targets.filter(({ op }) => op), targets.filter(({ program }) => program)]);
  if (ops.length && isNew) offer([...ops, ...programs]);
  return status === 200 ? kept.status : status;
}

function offer(found) {
  const chosen = byId("op").value;
  const before = targets.find(({ name }) => name === chosen);
  targets = found;
  byId("op").replaceChildren(...targets.map(({ name, title }) => optionOf(name, title)));
  if (targets.some(({ name }) => name === chosen)) byId("op").value = chosen;
  if (JSON.stringify(before) !== JSON.stringify(target())) showTarget();
}

const target = () => targets.find(({ name }) => name === byId("op").value);

function opTarget(path, operation, { components }) {
  const body = operation.requestBody.content["application/json"];
  const schema = components.schemas[body.schema.$ref.split("/").at(-1)];
  const inputs = Object.keys(schema.properties).filter((name) => name !== "dtype");
  const required = inputs.filter((name) => name in body.example);
  const options = operation.parameters.filter(({ in: place, name }) => place === "query" && !inputs.includes(name) && !NOT_OPTIONS.includes(name));
  return {
    name: operation.operationId,
    title: operation.operationId,
    op: operation.operationId,
    path: path.slice(1),
    summary: operation.summary,
    inputs,
    required,
    options,
    samples: { ...rowsOf(body.example), ...SAMPLES[operation.operationId] },
    stores: operation.parameters.some(({ name }) => name === "store"),
  };
}

const rowsOf = (example) =>
  Object.fromEntries(Object.entries(example).flatMap(([name, rows]) => (Array.isArray(rows) ? [[name, rows.map((row) => row.join(" ")).join("\n")]] : [])));

function programTarget({ name, inputs, outputs, steps }) {
  const names = Object.keys(inputs);
  return {
    name: `program:${name}`,
    title: `program ${name}`,
    program: name,
    path: `v1/programs/${encodeURIComponent(name)}`,
    summary: `${counted(steps, "step")}; answers ${outputs.join(", ")}.`,
    inputs: names,
    required: names,
    types: inputs,
    options: [],
    samples: {},
    stores: false,
  };
}

function optionOf(value, text = value) {
  const made = make("option", "", text);
  made.value = value;
  return made;
}

// ── the fields of an op ──

function showTarget() {
  const { summary, inputs, required, options, samples, stores, types } = target();
  byId("try-note").textContent = summary;
  byId("operands").replaceChildren(...required.map((name) => operand(name, samples[name] ?? "", types?.[name])));
  const further = inputs.filter((name) => !required.includes(name));
  byId("further").hidden = further.length === 0;
  byId("further-operands").replaceChildren(...further.map((name) => operand(name, "")));
  byId("options").replaceChildren(...options.map(optionField));
  byId("store-field").hidden = !stores;
  byId("dtype-field").dataset.fixed = types ? "yes" : "";
  showSource();
}

function operand(name, text, type) {
  const label = make("label", "", `${name} `);
  label.htmlFor = `in-${name}`;
  if (type) label.append(make("span", "note", `${type.dtype} [${type.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`));
  const field = make("textarea", "");
  Object.assign(field, { id: `in-${name}`, rows: 4, spellcheck: false, value: text });
  field.setAttribute("autocapitalize", "off");
  field.setAttribute("aria-describedby", "typed-note");
  return make("div", "", label, field);
}

function optionField({ name, required, description, schema, example }) {
  const label = make("label", "", required ? `${name} (required)` : name);
  label.htmlFor = `opt-${name}`;
  label.title = description;
  const words = schema.type === "boolean" ? ["true", "false"] : schema.enum;
  const field = words ? make("select", "") : make("input", "");
  if (words) field.append(...(required ? [] : [optionOf("", schema.default === undefined ? "default" : String(schema.default))]), ...words.filter((one) => one !== String(schema.default)).map((one) => optionOf(one)));
  else Object.assign(field, { autocomplete: "off", spellcheck: false, placeholder: schema.default === undefined ? "" : String(schema.default) });
  field.id = `opt-${name}`;
  if (example !== undefined) field.value = String(example);
  return make("div", "", label, field);
}

function showSource() {
  const isTyped = byId("try").elements.source.value === "typed";
  byId("filed").hidden = isTyped;
  byId("typed-note").textContent = isTyped
    ? "A row on each line, numbers apart by spaces or commas; or @name for a resident tensor."
    : "What the file does not have: @name for a resident tensor.";
  byId("dtype-field").hidden = !isTyped || byId("dtype-field").dataset.fixed === "yes";
}

// ── the request ──

async function send() {
  const button = byId("send");
  for (const field of byId("try").querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  byId("problem").replaceChildren();
  let request;
  try {
    request = requestOf(target(), byId("try").elements.source.value);
  } catch (error) {
    complain(["Not sent", error.message]);
    return;
  }
  button.disabled = true;
  try {
    await exchange(request);
  } catch {
    byId("answer").replaceChildren();
    complain(["No answer", "The server could not be reached, or its answer could not be read."]);
  } finally {
    button.disabled = false;
    button.focus({ preventScroll: true });
  }
}

function requestOf(chosen, source) {
  if (chosen === undefined) throw new Error("The list of ops is not known yet.");
  const options = Object.fromEntries(chosen.options.map(({ name }) => [name, byId(`opt-${name}`).value.trim()]).filter(([, value]) => value !== ""));
  const asked = new URLSearchParams(options);
  const operands = {};
  for (const name of chosen.inputs) {
    const value = byId(`in-${name}`).value.trim();
    if (value.startsWith("@")) asked.set(name, value);
    if (value.startsWith("@") || (source === "typed" && (value !== "" || chosen.required.includes(name)))) {
      operands[name] = { text: value.startsWith("@") ? value : numbersOf(chosen, name, value), dtype: dtypeOf(chosen, name) };
    }
  }
  const store = chosen.stores ? byId("store").value.trim().replace(/^@/, "") : "";
  if (store) asked.set("store", `@${store}`);
  const common = { target: chosen, path: chosen.path, query: asked.size ? `?${asked}` : "", operands, options: store ? { ...options, store } : options };
  return source === "typed" ? { ...common, ...typedBody(chosen, operands) } : { ...common, ...fileBody() };
}

const dtypeOf = (chosen, name) => chosen.types?.[name]?.dtype ?? byId("dtype").value;

function numbersOf({ required, types }, name, value) {
  try {
    const rows = parseMatrix(value, name);
    // What is optional is a vector: bias, scales, weights.
    const isVector = rows.length === 1 && (types ? types[name].shape.length === 1 : !required.includes(name));
    return textOf(isVector ? rows[0] : rows);
  } catch (error) {
    byId(`in-${name}`).setAttribute("aria-invalid", "true");
    throw error;
  }
}

function typedBody(chosen, operands) {
  const typed = Object.entries(operands).filter(([, { text }]) => !text.startsWith("@"));
  const members = typed.map(([name, { text, dtype }]) => `"${name}": ${chosen.types ? `{"data": ${text}, "dtype": "${dtype}"}` : text}`);
  if (!chosen.types) members.push(`"dtype": "${byId("dtype").value}"`);
  const body = typed.length ? `{${members.join(", ")}}` : "";
  return { body, type: "application/json", accept: "application/json", isTyped: true };
}

function fileBody() {
  const [file] = byId("file").files;
  if (file === undefined) {
    byId("file").setAttribute("aria-invalid", "true");
    throw new Error("Choose a file first.");
  }
  return { body: file, file: file.name, type: contentTypeOf(file.name), accept: CONTENT_TYPES.safetensors };
}

async function exchange(request) {
  const began_ms = performance.now();
  const response = await fetch(`${request.path}${request.query}`, {
    method: "POST",
    headers: withKey({ ...(request.body ? { "Content-Type": request.type } : {}), Accept: request.accept }),
    body: request.body,
  });
  const payload = await response.arrayBuffer();
  const spent_ms = performance.now() - began_ms;
  if (!response.ok) {
    byId("answer").replaceChildren();
    complain(problemOf(response, payload));
    return;
  }
  byId("answer").replaceChildren(...answerParts(response, payload, spent_ms, request));
}

/** What the server said of an error: title, detail, request id. */
function problemOf(response, payload) {
  const id = response.headers.get("x-request-id") ?? "";
  try {
    const { title, detail } = JSON.parse(new TextDecoder().decode(payload));
    return [`${response.status} ${title ?? ""}`.trim(), detail ?? "", id];
  } catch {
    return [`${response.status}`, response.statusText, id];
  }
}

function complain([title, detail, id = ""]) {
  const parts = [make("p", "", make("strong", "", title), detail ? ` — ${detail}` : "")];
  if (id) parts.push(make("p", "note", "Request ", make("code", "", id)));
  byId("problem").replaceChildren(...parts);
}

// ── the answer ──

function answerParts(response, payload, spent_ms, request) {
  const parts = [];
  if (response.status === 201) {
    const { name, dtype, shape } = JSON.parse(new TextDecoder().decode(payload));
    parts.push(make("p", "", make("b", "", `@${name}`), ` ${dtype} [${shape.join(", ")}], resident`));
  } else {
    const tensors = request.isTyped ? fromJson(new TextDecoder().decode(payload)) : fromSafetensors(payload);
    for (const tensor of tensors) parts.push(...tensorParts(tensor));
  }
  const batch = response.headers.get("x-batch-size");
  parts.push(...timingParts(timingsOf(response.headers.get("server-timing")), spent_ms));
  const shared = batch === "1" ? "alone in its launch" : `one of ${batch} requests in its launch`;
  const last = make("p", "note", `${shared} · ${joined(bytes(payload.byteLength))} of answer`);
  if (!request.isTyped && response.status !== 201) last.append(" · ", saveButton(payload));
  parts.push(last, ...snippets(request));
  return parts;
}

function tensorParts(tensor) {
  const title = make("p", "", make("b", "", tensor.name), ` ${tensor.dtype} [${tensor.shape.join(", ")}]`);
  return tensor.at !== null && tensor.count > 0 ? [title, ...preview(tensor)] : [title];
}

/** The first rows and columns of a result, as a table; of its first matrix, when it has several. */
function preview({ name, shape, at }) {
  const columns = shape.at(-1) ?? 1;
  const rows = shape.at(-2) ?? 1;
  const [tall, wide] = [Math.min(rows, MAX_SHOWN), Math.min(columns, MAX_SHOWN)];
  const table = make("table", "result");
  const body = table.createTBody();
  for (let i = 0; i < tall; i += 1) {
    const row = body.insertRow();
    for (let j = 0; j < wide; j += 1) row.insertCell().textContent = element(at(i * columns + j));
    if (wide < columns) row.insertCell().textContent = "…";
  }
  const box = make("div", "scroll", table);
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `Result ${name}`);
  const isWhole = tall === rows && wide === columns && shape.length <= 2;
  return isWhole ? [box] : [box, make("p", "note", `The first ${figure(tall)} × ${figure(wide)} of it.`)];
}

function timingParts(stages, spent_ms) {
  const inside = STAGES.reduce((sum, stage) => sum + (stages[stage] ?? 0), 0);
  const bar = make("div", "spans");
  bar.setAttribute("aria-hidden", "true");
  const words = make("p", "timing");
  const add = (name, spent, kind) => {
    const span = make("span", kind);
    span.style.flexGrow = String(Math.max(spent, spent_ms / 400));
    bar.append(span);
    words.append(make("span", "", `${name} `, make("b", "", `${figure(spent)}\u00a0ms`)));
  };
  for (const stage of STAGES) if (stages[stage]) add(stage, stages[stage], stage);
  add("network and the rest", Math.max(0, spent_ms - inside), "elsewhere");
  words.append(make("span", "", "in all ", make("b", "", `${figure(spent_ms)}\u00a0ms`)));
  return [bar, words];
}

function saveButton(payload) {
  const button = make("button", "link", "save as safetensors");
  button.type = "button";
  button.addEventListener("click", () => save(new Blob([payload], { type: CONTENT_TYPES.safetensors }), "out.safetensors"));
  return button;
}

function snippets(request) {
  const hasKey = Boolean(withKey().Authorization);
  return [
    snippet("The same with curl", curlOf({ ...request, hasKey })),
    snippet("The same in Python", pythonOf({ ...request, hasKey })),
  ];
}

function snippet(title, text) {
  const copy = make("button", "link", "copy");
  copy.type = "button";
  copy.setAttribute("aria-label", `Copy: ${title.toLowerCase()}`);
  const shown = make("pre", "", text);
  shown.tabIndex = 0;
  copy.addEventListener("click", async () => {
    // Browsers give pages the clipboard only over HTTPS or on the machine itself; elsewhere the text is selected.
    await navigator.clipboard?.writeText(text).then(() => (copy.textContent = "copied"));
    if (!navigator.clipboard) getSelection().selectAllChildren(shown);
  });
  return make("details", "snippet", make("summary", "", title), copy, shown);
}
