// node page.mjs URL TANDEM STATE [PICTURES]: what a person does with the live page, and with `tandem top` (top.py), against a
// real cluster.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";

import { browser, complete, say, tab, words } from "./browser.mjs";

const [url, tandem, state, pictures] = process.argv.slice(2);
const chromium = await browser();
try {
  const { page, errors, begun } = await tab(chromium, url, { colorScheme: "light" });

  await page.waitForFunction(() => document.querySelectorAll("#nodes tbody tr").length === 3);
  const shown = Math.round(performance.now() - begun);
  assert.ok(shown < 2000, `nodes after ${shown} ms`);
  assert.deepEqual(await page.locator("#nodes tbody th").allTextContents(), ["prefill-0", "decode-0", "decode-1"]);
  say(`3 nodes shown ${shown} ms after the page was asked for`);

  // Prompts of several lengths; the last one is opened.
  for (const count of [40, 120, 200, 80, 300, 20]) await complete(url, words(count), { max_tokens: 24 });
  const { id } = await complete(url, words(250), { max_tokens: 24 });
  const row = page.locator("#list tbody tr").filter({ hasText: id.replace(/^cmpl-/, "") });
  await row.first().click({ timeout: 3000 });
  await page.waitForSelector("#request-body .waterfall");
  const spans = (await page.locator("#request-body .waterfall tbody th").allTextContents());
  for (const name of ["queue", "route", "prefill", "prefill.forward", "kv.transfer", "transfer", "decode"]) assert.ok(spans.includes(name), `no ${name} in ${spans}`);
  const said = await page.locator("#request-body .summary").innerText();
  assert.match(said, /TTFT [\d.,]+ ms = queue .* \+ route .* \+ prefill/);
  assert.match(said, /ms hidden behind the prefill, .* ms exposed/);
  assert.equal(await page.locator("#request-body tr.chosen").count(), 1, "the candidate that was chosen");
  assert.ok(await page.locator("#links tbody tr").count() >= 1, "a link");
  assert.ok(await page.locator("#tail g[role=button]").count() >= 1, "a bar of the tail");
  say(`a click shows the waterfall of ${spans.length} spans`);
  await page.waitForTimeout(1500);
  await pictured(page, "light");
  execFileSync("python3", [`${import.meta.dirname}/top.py`, tandem, url], { stdio: "inherit" });

  // Everything by the keyboard.
  await page.keyboard.press("Escape");
  assert.ok(await page.locator("#request").isHidden());
  await page.keyboard.press("j");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#request-body .waterfall");
  const opened = page.url();
  await page.keyboard.press("Escape");
  await page.keyboard.press("/");
  await page.keyboard.type("no such request");
  await page.waitForFunction(() => document.querySelectorAll("#list tbody tr").length === 0);
  await page.locator("#find").fill("");
  await page.locator("#outcome").selectOption("failed");
  assert.equal(await page.locator("#list tbody tr").count(), 0, "nothing failed");
  await page.locator("#outcome").selectOption("");
  await page.locator("h1").click();
  await page.keyboard.press("?");
  assert.ok(await page.locator("#help").isVisible());
  await page.keyboard.press("Escape");
  say("keys: list, open, close, find, help");

  // What a client says is text.
  const evil = "<img src=x onerror=alert(1)>";
  await fetch(`${url}/v1/completions`, { method: "POST", headers: { "content-type": "application/json", "x-request-id": evil.replace(/ /g, "_") },
    body: JSON.stringify({ prompt: "a", max_tokens: 2 }) });
  await page.locator("#list tbody tr").filter({ hasText: "onerror" }).first().click({ timeout: 3000 });
  await page.waitForSelector("#request-body .waterfall");
  assert.equal(await page.locator("main img").count(), 0);

  // Dark, and by its address.
  const dark = await tab(chromium, url, { colorScheme: "dark" });
  await dark.page.goto(opened);
  await dark.page.waitForSelector("#request-body .waterfall");
  assert.notEqual(await colour(dark.page), await colour(page));
  await dark.page.waitForTimeout(1200);
  await pictured(dark.page, "dark");
  assert.deepEqual(dark.errors, []);
  await dark.context.close();
  say("an address opens its request; dark where the system is");

  // A node is killed, another one stops without a word: within the lease, and what a look takes.
  const cluster = () => JSON.parse(readFileSync(state, "utf8"));
  const pid = (name) => cluster().processes.find(([process]) => process === name)[1];
  const { lease_ms: lease } = await (await fetch(`${url}/debug/cluster`)).json();
  for (const [name, signal, most] of [["decode-1", "SIGKILL", 1000], ["prefill-0", "SIGSTOP", lease + 1000]]) {
    const process_id = pid(name), killed = performance.now();
    process.kill(process_id, signal);
    const gone = page.locator("#nodes tr.gone").filter({ hasText: name });
    await gone.waitFor({ timeout: most + 5000 });
    const after = Math.round(performance.now() - killed);
    assert.ok(after <= most, `${name} after ${after} ms`);
    say(`${name}, ${signal}: shown as gone after ${after} ms (lease ${lease} ms): ${(await gone.locator("td").last().textContent())}`);
    if (signal === "SIGSTOP") process.kill(process_id, "SIGCONT");
  }

  assert.deepEqual(errors, [], "no error in the console");

  // The router goes.
  process.kill(cluster().pid, "SIGTERM");
  await page.locator("#lost").waitFor({ timeout: 20_000 });
  assert.match(await page.locator("#lost").textContent(), /No connection to the router/);
  say("the page says that the router is gone");
} finally {
  await chromium.close();
}

function colour(page) {
  return page.evaluate(() => getComputedStyle(document.body).backgroundColor);
}

async function pictured(page, name) {
  if (!pictures) return;
  const { mkdirSync } = await import("node:fs");
  mkdirSync(pictures, { recursive: true });
  await page.evaluate(() => window.scrollTo(0, 0));
  await page.screenshot({ path: `${pictures}/${name}.png`, fullPage: true });
  say(`${pictures}/${name}.png`);
}
