// Resident tensors: the list, and uploading, saving and deleting them.

import { ago, bytes, counted, figure, joined } from "./format.js";
import { byId, fillRows, make, save, write } from "./page.js";
import { askJson, withKey } from "./poll.js";
import { refusal } from "./panels.js";
import { CONTENT_TYPES, contentTypeOf } from "./tensors.js";

const MAX_SHOWN = 200;
// A second press within this deletes.
const SURE_MS = 4000;

/** Makes the form work, and the buttons of the rows. */
export function startResidents() {
  byId("upload").addEventListener("submit", (event) => {
    event.preventDefault();
    upload();
  });
  byId("residents").addEventListener("click", (event) => {
    const button = event.target.closest("button[data-name]");
    if (button === null) return;
    if (button.dataset.does === "save") download(button.dataset.name);
    else if (button.dataset.sure) remove(button.dataset.name);
    else makeSure(button);
  });
}

/** Reads the list and shows it; returns the status of the answer. */
export async function readResidents() {
  const answer = await askJson("v1/tensors");
  show(answer);
  return answer.status;
}

function show({ status, body }) {
  const place = byId("residents").tBodies[0];
  if (!Array.isArray(body) || status !== 200) {
    write(byId("residents-note"), refusal(status));
    fillRows(place, [], status === 503 ? "Listed again when the engines are ready." : "Not known.");
    return;
  }
  const sorted = [...body].sort((x, y) => (y.last_used ?? "").localeCompare(x.last_used ?? "") || x.name.localeCompare(y.name));
  const whole = body.reduce((sum, one) => sum + one.bytes, 0);
  const rest = body.length > MAX_SHOWN ? `; the ${MAX_SHOWN} last used are shown` : "";
  write(byId("residents-note"), body.length ? `${counted(body.length, "tensor")}, ${joined(bytes(whole))}${rest}` : "");
  const rows = sorted.slice(0, MAX_SHOWN).map((one) => [
    one.name,
    `[${one.shape.join(", ")}]`,
    one.dtype,
    joined(bytes(one.bytes)),
    (one.engines?.join(", ") ?? "") + (one.placement === "shard" ? " (a part each)" : ""),
    figure(one.hits),
    ago(one.last_used),
    actions(one.name),
  ]);
  fillRows(place, rows, "None. Upload one below: requests then carry only the other operand.");
  const options = sorted.slice(0, MAX_SHOWN).map(({ name }) => {
    const option = make("option", "");
    option.value = `@${name}`;
    return option;
  });
  byId("resident-names").replaceChildren(...options);
}

function actions(name) {
  const button = (does, text) => {
    const made = make("button", "link", text);
    made.type = "button";
    Object.assign(made.dataset, { name, does });
    made.setAttribute("aria-label", `${text} ${name}`);
    return made;
  };
  return make("span", "actions", button("save", "save"), button("delete", "delete"));
}

function makeSure(button) {
  button.dataset.sure = "yes";
  button.textContent = "really?";
  button.setAttribute("aria-label", `Really delete ${button.dataset.name}?`);
  setTimeout(() => {
    delete button.dataset.sure;
    button.textContent = "delete";
    button.setAttribute("aria-label", `delete ${button.dataset.name}`);
  }, SURE_MS);
}

const pathOf = (name) => `v1/tensors/${name.split("/").map(encodeURIComponent).join("/")}`;

async function upload() {
  const [file] = byId("upload-file").files;
  const name = byId("upload-name").value.trim().replace(/^@/, "");
  if (file === undefined || name === "") {
    tell("Choose a file and type a name.");
    return;
  }
  const headers = { "Content-Type": contentTypeOf(file.name) };
  await call(pathOf(name), { method: "PUT", headers, body: file }, ({ status }) => {
    tell(`${name} ${status === 201 ? "is resident" : "was replaced"}.`);
    byId("upload").reset();
  });
}

const remove = (name) => call(pathOf(name), { method: "DELETE" }, () => tell(`${name} was deleted.`));

const download = (name) =>
  call(pathOf(name), { headers: { Accept: CONTENT_TYPES.safetensors } }, async (response) => {
    save(await response.blob(), `${name.replaceAll("/", "_")}.safetensors`);
    tell(`${name} was saved.`);
  });

async function call(path, options, done) {
  try {
    const response = await fetch(path, { ...options, headers: withKey(options.headers) });
    if (response.ok) await done(response);
    else tell(await problemOf(response));
  } catch {
    tell("The server could not be reached.");
  }
  readResidents();
}

async function problemOf(response) {
  const problem = await response.json().catch(() => ({}));
  return `${response.status} ${problem.title ?? ""}: ${problem.detail ?? response.statusText}`;
}

const tell = (text) => write(byId("residents-said"), text);
