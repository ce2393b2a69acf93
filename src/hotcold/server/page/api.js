// Requests to the server, by the routes that every client uses.

const KEY = "hotcold.key";

/** Thrown for an error that the server answers. */
export class Refused extends Error {
  constructor(status, error, wait) {
    super(error?.message || `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code || "";
    this.wait = wait;
  }
}

/** Returns whether a text is a valid key: the server has the same rule. */
export const isKey = (text) => /^[!-~]{1,512}$/.test(text);

export function keepKey(key) {
  try { sessionStorage.setItem(KEY, key); } catch { memory = key; }
}
let memory = "";
function key() {
  let kept = memory;
  try { kept = sessionStorage.getItem(KEY) || memory; } catch { /* no access to the storage */ }
  return isKey(kept) ? kept : "";
}

// A program that opens the page may pass the key after the #, which no server and no log sees. The key is always
// removed from the address, even if it is invalid or arrives later.
function takeKey() {
  const start = "#key=";
  if (!location.hash.startsWith(start)) return;
  let handed = location.hash.slice(start.length);
  history.replaceState(null, "", location.pathname + location.search);
  try { handed = decodeURIComponent(handed); } catch { /* not encoded */ }
  if (isKey(handed)) keepKey(handed);
}
takeKey();
addEventListener("hashchange", takeKey);

/** Returns a successful response; throws Refused for others. */
async function ask(path, options = {}) {
  const headers = { ...(options.body && { "Content-Type": "application/json" }) };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit" });
  if (response.ok) return response;
  let error = null;
  try { error = (await response.json()).error; } catch { /* no JSON */ }
  throw new Refused(response.status, error, Number(response.headers.get("Retry-After")) || 0);
}

export async function health() {
  const response = await fetch("/health", { credentials: "omit" });
  let body = {};
  try { body = await response.json(); } catch { /* no JSON */ }
  return { ready: response.ok, ...body };
}

export async function pictureInfo() {
  return (await ask("/picture/info")).json();
}

/** Returns the number of tokens in a prompt. Throws Refused, with a code for a prompt above the context. */
export async function promptTokens(body) {
  const response = await ask("/v1/messages/count_tokens", { method: "POST", body: JSON.stringify(body) });
  return (await response.json()).input_tokens;
}

/** Yields the events of a streamed answer. */
export async function* stream(path, body, signal) {
  const response = await ask(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      rest += value;
      let end;
      while ((end = /\r?\n\r?\n/.exec(rest))) {
        const event = rest.slice(0, end.index);
        rest = rest.slice(end.index + end[0].length);
        const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue; // a comment, which keeps the connection open
        const found = JSON.parse(data);
        if (found.error) throw new Refused(found.error.status || 500, found.error, 0);
        yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // frees the model when the caller stops reading
  }
}
