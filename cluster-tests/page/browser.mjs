// Chromium, what a page must not do in it, and how a test asks the cluster.
import assert from "node:assert/strict";

const { chromium } = await import(process.env.PLAYWRIGHT);

/** A browser of its own, without a sandbox: tests run as root in containers. */
export function browser() {
  const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
  return chromium.launch({ executablePath: process.env.CHROMIUM, args });
}

/** A tab on `url`, with all that it complained of. A question that the test itself breaks off is not among it. */
export async function tab(of, url, options = {}) {
  const context = await of.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => { if (message.type() === "error" || message.type() === "warning") errors.push(message.text()); });
  page.on("request", (request) => { if (!request.url().startsWith(url) && !request.url().startsWith("data:")) errors.push(`asks ${request.url()}`); });
  const begun = performance.now();
  await page.goto(`${url}/`);
  return { page, context, errors, begun };
}

/** One answer of the cluster. */
export async function complete(url, words, more = {}) {
  const models = await (await fetch(`${url}/v1/models`)).json();
  const body = { model: models.data[0].id, prompt: words, max_tokens: 16, ...more };
  const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  assert.equal(answer.status, 200, await answer.clone().text());
  return answer.json();
}

/** A prompt of so many words, another one each time. */
export const words = (count) => Array.from({ length: count }, () => ["river", "stone", "lamp", "seven", "cloud"][Math.floor(Math.random() * 5)]).join(" ");

/** Says what was found. */
export const say = (text) => console.log(`test-page: ${text}`);
