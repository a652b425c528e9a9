// The same request for a terminal and for a program. Pure text: it knows no page.

/** As a command.
 *
 * @param request {path, query, body, type, file}: `file` is a file's name instead of a body.
 */
export function curlOf({ path, query, body, type, file, hasKey }) {
  const address = new URL(`${path}${query}`, document.baseURI);
  const key = hasKey ? ' \\\n  -H "authorization: Bearer $KEY"' : "";
  const data = file ? `--data-binary ${quoted(`@${file}`)} -o out.safetensors` : `-d ${quoted(body)}`;
  const accept = file ? " \\\n  -H 'accept: application/x-safetensors'" : "";
  return `curl -s ${quoted(String(address))} \\\n  -H 'content-type: ${type}'${accept}${key} \\\n  ${data}`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** As Python with the client. Operands are texts of numbers, or `@name`. */
export function pythonOf({ target, operands, options, file, hasKey }) {
  const key = hasKey ? ", api_key=KEY" : "";
  const dtypes = new Set(Object.values(operands).filter(({ text }) => !text.startsWith("@")).map(({ dtype }) => dtype));
  const lines = ["from tilewire import Client", ""];
  if (dtypes.has("bfloat16")) lines.unshift("import ml_dtypes  # makes bfloat16 known to NumPy");
  if (file?.endsWith(".safetensors")) lines.unshift("import safetensors.numpy");
  else if (file || [...dtypes].some((dtype) => dtype !== "float32")) lines.unshift("import numpy as np");
  lines.push(`c = Client("${new URL(".", document.baseURI).href.replace(/\/$/, "")}"${key})`);
  const given = Object.entries(operands).map(([name, value]) => `${JSON.stringify(name)}: ${literal(value)}`);
  if (file) {
    const reader = file.endsWith(".safetensors") ? "safetensors.numpy.load_file" : "np.load";
    const isOne = file.endsWith(".npy");
    lines.push(`operands = ${isOne ? `{${JSON.stringify(target.inputs[0])}: ` : "dict("}${reader}(${JSON.stringify(file)})${isOne ? "}" : ")"}`);
    if (given.length) lines.push(`operands |= {${given.join(", ")}}`);
  }
  const named = Object.entries(options).map(([name, value]) => `, ${name}=${option(value)}`);
  const all = file ? "operands" : `{${given.join(", ")}}`;
  if (target.program) lines.push(`answer = c.programs[${JSON.stringify(target.program)}].run(${all})`);
  else lines.push(`answer = c.run(${JSON.stringify(target.op)}, ${all}${named.join("")})`);
  lines.push("print(answer.result, answer.timings_ms)");
  return lines.join("\n");
}

function literal({ text, dtype }) {
  if (text.startsWith("@")) return JSON.stringify(text);
  const numbers = text.replace(/-?\b(?:NaN|Infinity)\b/g, (word) => `float("${word.replace("Infinity", "inf").toLowerCase()}")`);
  return dtype === "float32" ? numbers : `np.array(${numbers}, ${JSON.stringify(dtype)})`;
}

function option(value) {
  if (value === "true" || value === "false") return value === "true" ? "True" : "False";
  return Number.isNaN(Number(value)) ? JSON.stringify(value) : value;
}
