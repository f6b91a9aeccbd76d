// The stream of the cluster's changes: server-sent events read by `fetch`, since an EventSource sends no API key. Says
// when it is lost, and connects again, later and later.

/** Without a word for so long the connection is lost: the router says something every second. */
const SILENCE_MS = 5000;
const RETRY_MS = { first: 500, most: 10_000 };

/** `on.event(data)`, `on.state("connecting" | "live" | "lost", why)`, `on.keyWanted()`. */
export class Stream {
  #on;
  #key = null;
  #abort = null;
  #timer = null;
  #retryMs = RETRY_MS.first;

  constructor(on) {
    this.#on = on;
  }

  /** Connects, with a key if there is one. */
  open(key) {
    this.#key = key;
    this.#retryMs = RETRY_MS.first;
    this.#connect();
  }

  /** Headers of every question to the router. */
  headers() {
    return this.#key ? { authorization: `Bearer ${this.#key}` } : {};
  }

  async #connect() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    const abort = new AbortController();
    this.#abort = abort;
    let wait = null;
    this.#watch(abort);
    try {
      const answer = await fetch("page/events", { headers: this.headers(), signal: abort.signal, cache: "no-store" });
      if (answer.status === 401) {
        clearTimeout(this.#timer);
        this.#on.keyWanted();
        return;
      }
      if (!answer.ok) {
        wait = Number(answer.headers.get("retry-after")) * 1000 || null;
        throw new Error(await reason(answer));
      }
      await this.#read(answer.body.getReader(), abort);
      throw new Error("the router ended the stream");
    } catch (error) {
      // Another connection has begun.
      if (this.#abort !== abort) return;
      const why = abort.signal.aborted ? `nothing came for ${SILENCE_MS / 1000} s` : error.message;
      this.#on.state("lost", why);
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#connect(), wait ?? this.#retryMs * (0.75 + Math.random() / 2));
      this.#retryMs = Math.min(this.#retryMs * 2, RETRY_MS.most);
    }
  }

  async #read(reader, abort) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.#watch(abort);
      text += decoder.decode(value, { stream: true });
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        this.#event(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  }

  #event(lines) {
    const data = JSON.parse(lines.slice("data: ".length));
    if (data.kind === "whole") {
      this.#retryMs = RETRY_MS.first;
      this.#on.state("live", "");
    }
    this.#on.event(data);
  }

  #watch(abort) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => abort.abort(), SILENCE_MS);
  }
}

/** What the router says of a refusal. */
export async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the router answers ${answer.status}`;
  }
}
