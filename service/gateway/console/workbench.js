// The form: sends a product to /v1/matmul and shows the answer, what it cost, or why it was refused.

import { bytes, figure, joined } from "./format.js";
import { byId, make } from "./page.js";
import { withKey } from "./poll.js";
import { element, fromJson, fromSafetensors, jsonOf, parseMatrix, timingsOf } from "./tensors.js";

const MAX_SHOWN = 8;
const STAGES = ["receive", "queue", "h2d", "kernel", "d2h"];
const CONTENT_TYPES = { safetensors: "application/x-safetensors", npz: "application/x-npz", npy: "application/x-npy" };
let download = "";

/** Makes the form work. */
export function startWorkbench() {
  const form = byId("multiply");
  const source = () => form.elements.source.value;
  const choose = () => {
    byId("typed").hidden = source() !== "typed";
    byId("filed").hidden = source() !== "file";
    byId("dtype-field").hidden = source() !== "typed";
  };
  form.addEventListener("change", choose);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(source());
  });
  choose();
}

async function send(source) {
  const button = byId("send");
  for (const id of ["a", "b", "file", "resident"]) byId(id).removeAttribute("aria-invalid");
  byId("problem").replaceChildren();
  let request;
  try {
    request = source === "typed" ? typedRequest() : fileRequest();
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

function typedRequest() {
  const matrix = (id) => {
    try {
      return parseMatrix(byId(id).value, id);
    } catch (error) {
      byId(id).setAttribute("aria-invalid", "true");
      throw error;
    }
  };
  const body = jsonOf(matrix("a"), matrix("b"), byId("dtype").value);
  return { body, type: "application/json", accept: "application/json", query: query({}), isTyped: true };
}

function fileRequest() {
  const [file] = byId("file").files;
  if (file === undefined) {
    byId("file").setAttribute("aria-invalid", "true");
    throw new Error("Choose a file first.");
  }
  const type = CONTENT_TYPES[file.name.split(".").at(-1).toLowerCase()] ?? "application/octet-stream";
  const name = byId("resident").value.trim().replace(/^@/, "");
  return { body: file, type, accept: CONTENT_TYPES.safetensors, query: query(name ? { b: `@${name}` } : {}) };
}

function query(parameters) {
  const activation = byId("activation").value;
  const all = new URLSearchParams(activation === "none" ? parameters : { ...parameters, activation });
  return all.size ? `?${all}` : "";
}

async function exchange(request) {
  const began_ms = performance.now();
  const response = await fetch(`v1/matmul${request.query}`, {
    method: "POST",
    headers: withKey({ "Content-Type": request.type, Accept: request.accept }),
    body: request.body,
  });
  const payload = await response.arrayBuffer();
  const spent_ms = performance.now() - began_ms;
  if (!response.ok) {
    byId("answer").replaceChildren();
    complain(problemOf(response, payload));
    return;
  }
  const text = request.isTyped ? new TextDecoder().decode(payload) : "";
  const tensor = request.isTyped ? fromJson(text) : fromSafetensors(payload);
  byId("answer").replaceChildren(...answerParts(tensor, response, payload, spent_ms, request));
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

function answerParts(tensor, response, payload, spent_ms, request) {
  const batch = response.headers.get("x-batch-size");
  const parts = [make("p", "", make("b", "", "out"), ` ${tensor.dtype} [${tensor.shape.join(", ")}]`)];
  if (tensor.at !== null && tensor.count > 0) parts.push(...preview(tensor));
  parts.push(...timingParts(timingsOf(response.headers.get("server-timing")), spent_ms));
  const shared = batch === "1" ? "alone in its launch" : `one of ${batch} requests in its launch`;
  const last = make("p", "note", `${shared} · ${joined(bytes(payload.byteLength))} of answer`);
  if (!request.isTyped) last.append(" · ", downloadLink(payload));
  parts.push(last);
  if (request.isTyped) parts.push(curlOf(request));
  return parts;
}

/** The first rows and columns of a result, as a table; of its first matrix, when it has several. */
function preview({ shape, at }) {
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
  box.setAttribute("aria-label", "Result");
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

function downloadLink(payload) {
  URL.revokeObjectURL(download);
  download = URL.createObjectURL(new Blob([payload], { type: CONTENT_TYPES.safetensors }));
  const link = make("a", "", "save as safetensors");
  link.href = download;
  link.download = "out.safetensors";
  return link;
}

function curlOf({ body, query: asked }) {
  const address = new URL(`v1/matmul${asked}`, document.baseURI);
  const key = withKey().Authorization ? ' \\\n  -H "authorization: Bearer $KEY"' : "";
  const text = `curl -s '${address}' \\\n  -H 'content-type: application/json'${key} \\\n  -d '${body}'`;
  return make("details", "", make("summary", "", "The same with curl"), make("pre", "", text));
}
