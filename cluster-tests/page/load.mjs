// node load.mjs URL: what the page costs its reader: 100 nodes, 1,000 traces, and requests that go on meanwhile.
//
// Script time is Chromium's own, out of a trace of the tab's main thread. `Performance.getMetrics` has a ScriptDuration,
// too, but does not count what runs after an `await` (microtasks), and that is nearly all of this page: it says 0.
import assert from "node:assert/strict";

import { browser, complete, say, tab, words } from "./browser.mjs";

const NODES = 100, TRACES = 1000, AT_ONCE = 16;
/** Of script, for each second. */
const MOST_MS = 50;
const SECONDS = 15;

const [url] = process.argv.slice(2);
const until = async (done) => Promise.all(Array.from({ length: AT_ONCE }, async () => { while (!done()) await complete(url, words(60), { max_tokens: 8 }); }));

let sent = 0;
await until(() => sent++ >= TRACES);
const chromium = await browser();
try {
  const { page, context, errors } = await tab(chromium, url);
  await page.waitForFunction((nodes) => document.querySelectorAll("#nodes tbody tr").length === nodes, NODES);
  await page.waitForFunction((traces) => document.querySelector("#shown").textContent.includes(`${traces} kept`), TRACES.toLocaleString("en"));
  const session = await context.newCDPSession(page);
  await session.send("Performance.enable");
  const metrics = async () => Object.fromEntries((await session.send("Performance.getMetrics")).metrics.map(({ name, value }) => [name, value]));
  await page.waitForTimeout(3000);

  // Each part: what the cluster does meanwhile.
  for (const [name, rate] of [["an idle cluster", 0], ["20 requests/s", 20]]) {
    await chromium.startTracing(page, { categories: ["devtools.timeline", "v8.execute", "disabled-by-default-v8.gc"] });
    const from = await metrics(), begun = performance.now();
    let over = false;
    const load = (async () => {
      while (!over && rate > 0) {
        void complete(url, words(60), { max_tokens: 8 });
        await new Promise((done) => setTimeout(done, 1000 / rate));
      }
    })();
    await page.waitForTimeout(SECONDS * 1000);
    const to = await metrics(), seconds = (performance.now() - begun) / 1000;
    const script = scriptMs(JSON.parse(await chromium.stopTracing())) / seconds;
    over = true;
    await load;
    const [all, counted] = ["TaskDuration", "ScriptDuration"].map((metric) => (1000 * (to[metric] - from[metric])) / seconds);
    say(`${NODES} nodes, ${TRACES} traces, ${name}: ${script.toFixed(1)} ms of script a second (ScriptDuration says ${counted.toFixed(1)}), `
      + `${all.toFixed(1)} ms with layout and painting, heap ${(to.JSHeapUsedSize / 1e6).toFixed(1)} MB`);
    assert.ok(script > 0, "the trace has no script: has Chromium other names for it?");
    assert.ok(script < MOST_MS, `${script} ms of script a second`);
  }
  assert.deepEqual(errors, [], "no error in the console");
} finally {
  await chromium.close();
}

/** Milliseconds in which the page's main thread ran script; what runs within another piece counts once. */
function scriptMs({ traceEvents }) {
  const SCRIPT = ["RunMicrotasks", "FunctionCall", "EvaluateScript", "FireAnimationFrame", "TimerFire", "EventDispatch", "MinorGC", "MajorGC"];
  const ofScript = traceEvents.filter((event) => event.ph === "X" && SCRIPT.includes(event.name));
  const threads = new Map();
  for (const { pid, tid, ts, dur = 0 } of ofScript) {
    const key = `${pid} ${tid}`;
    threads.set(key, [...(threads.get(key) ?? []), [ts, ts + dur]]);
  }
  let most = 0;
  for (const pieces of threads.values()) {
    let sum = 0, end = 0;
    for (const [from, to] of pieces.sort((a, b) => a[0] - b[0])) {
      sum += Math.max(0, to - Math.max(from, end));
      end = Math.max(end, to);
    }
    most = Math.max(most, sum);
  }
  return most / 1000;
}
