// Asks the server: with the user's key, with a time-out, and with a word for what went wrong. Knows no figure.

const KEY = "tilewire-api-key";
const TIMEOUT_MS = 4000;

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

/** Keeps the key for this tab, or forgets it. */
export function keepApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Headers with the user's key, if one was typed in. */
export function withKey(headers = {}) {
  const key = apiKey();
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

/** Asks once; paths are relative, so that a proxy may serve this under a prefix. Never throws: {status, text}, and status 0 when no answer came. */
export async function ask(path, accept) {
  try {
    const response = await fetch(path, {
      headers: withKey({ Accept: accept }),
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    return { status: response.status, text: await response.text() };
  } catch {
    return { status: 0, text: "" };
  }
}

/** Asks for JSON: {status, body}; the body is null when it is none. */
export async function askJson(path) {
  const { status, text } = await ask(path, "application/json");
  try {
    return { status, body: JSON.parse(text) };
  } catch {
    return { status, body: null };
  }
}

/** Calls again and again, the next time a period after the last began; not while the page is hidden. */
export function every(period_ms, run) {
  let timer = 0;
  let isRunning = false;
  const turn = async () => {
    clearTimeout(timer);
    if (isRunning || document.hidden) return;
    isRunning = true;
    const began_ms = performance.now();
    try {
      await run();
    } finally {
      isRunning = false;
      timer = setTimeout(turn, Math.max(50, period_ms - (performance.now() - began_ms)));
    }
  };
  document.addEventListener("visibilitychange", turn);
  turn();
  return turn;
}
