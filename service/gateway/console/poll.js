// Asks the server: with the user's key, with a time-out, and with a word for what went wrong. Knows no figure.

const KEY = "tilewire-api-key";
const TIMEOUT_MS = 4000;
// Pause behind a refusal: each one is an entry of the server's failures, and what it refuses now it refuses in a second, too.
const REFUSED_MS = 60_000;
const UNAUTHORIZED = 401;
// Paths that this tab's key, or no key, does not open. They stay so until the key changes.
const locked = new Set();

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

/** Keeps the key for this tab, or forgets it. */
export function keepApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  locked.clear();
}

/** Headers with the user's key, if one was typed in. */
export function withKey(headers = {}) {
  const key = apiKey();
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

/**
 * Asks once; paths are relative, so that a proxy may serve this under a prefix. Never throws: {status, text}, and status 0 when no answer came.
 * A path that was 401 is 401 again without a request, until the key changes.
 */
export async function ask(path, accept) {
  if (locked.has(path)) return { status: UNAUTHORIZED, text: "" };
  const key = apiKey();
  try {
    const response = await fetch(path, {
      headers: withKey({ Accept: accept }),
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (response.status === UNAUTHORIZED && key === apiKey()) locked.add(path);
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

/**
 * Calls again and again, the next time a period after the last began; not while the page is hidden.
 *
 * @param period_ms - Time between two calls.
 * @param run - The call: asks, and returns the status of the answer.
 * @param retry_ms - Time between two calls as long as no answer comes, or an error of the server.
 * @returns A function that calls at once, for a key that changed.
 */
export function every(period_ms, run, retry_ms = period_ms) {
  let timer = 0;
  let due_ms = 0;
  let isRunning = false;
  const turn = async () => {
    clearTimeout(timer);
    if (isRunning || document.hidden) return;
    const early_ms = due_ms - performance.now();
    if (early_ms > 0) {
      timer = setTimeout(turn, early_ms);
      return;
    }
    isRunning = true;
    const [began_ms, key] = [performance.now(), apiKey()];
    let pause_ms = retry_ms;
    try {
      pause_ms = pauseAfter(await run(), period_ms, retry_ms);
    } finally {
      isRunning = false;
      due_ms = key === apiKey() ? Math.max(performance.now() + 50, began_ms + pause_ms) : 0;
      turn();
    }
  };
  document.addEventListener("visibilitychange", turn);
  turn();
  return () => {
    due_ms = 0;
    turn();
  };
}

function pauseAfter(status, period_ms, retry_ms) {
  // What is locked costs no request, and is asked as soon as there is another key.
  if (status === UNAUTHORIZED || (status >= 200 && status < 400)) return period_ms;
  return status >= 400 && status < 500 ? Math.max(period_ms, REFUSED_MS) : retry_ms;
}
