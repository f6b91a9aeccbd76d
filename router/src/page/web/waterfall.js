// One request: its spans as a waterfall, its transfer in what was hidden and what was exposed, and the candidates of
// its route in predicted milliseconds.
import { bytes, element, ms, whole } from "./elements.js";

/** Deeper spans are drawn at this depth: a cycle or a hostile trace does not end the drawing. */
const MAX_DEPTH = 12;
const MAX_CANDIDATES = 50;
const TERMS = [["wait p", "wait_prefill_ms"], ["prefill", "prefill_ms"], ["exposed", "exposed_ms"], ["wait d", "wait_decode_ms"],
  ["step", "step_ms"], ["interference", "interference_ms"], ["total", "total_ms"], ["TTFT", "ttft_ms"]];

/** The elements for a trace; of several requests in it, the one with this root span. */
export function waterfall(trace, request) {
  const spans = trace.spans.map((span) => ({ ...span, from: Number(span.start_unix_ns), to: Number(span.end_unix_ns) }));
  const roots = spans.filter((span) => span.attributes["tandem.request_id"] !== undefined);
  const root = roots.find((span) => span.span_id === request) ?? roots[0] ?? spans[0];
  if (!root) return [element("p", {}, "The trace has no spans.")];
  const rows = tree(spans, root);
  const found = (name) => rows.find(({ span }) => span.name === name)?.span;
  return [
    summary(root, rows, found("kv.transfer")),
    element("h3", {}, `Waterfall: ${rows.length} spans in ${ms((root.to - root.from) / 1e6)} ms`),
    element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Waterfall" }, bars(rows, found("transfer"))),
    ...candidates(found("route")),
    element("p", { class: "quiet" }, `trace ${trace.trace_id}`),
  ];
}

/** Parents before children, siblings by start; each span once, whatever the parents say. */
function tree(spans, root) {
  const children = new Map();
  for (const span of spans) {
    if (span !== root) children.set(span.parent_span_id, [...(children.get(span.parent_span_id) ?? []), span]);
  }
  const rows = [], stack = [{ span: root, depth: 0 }];
  while (stack.length > 0) {
    const row = stack.pop();
    rows.push(row);
    const below = children.get(row.span.span_id) ?? [];
    children.delete(row.span.span_id);
    below.sort((a, b) => b.from - a.from);
    stack.push(...below.map((span) => ({ span, depth: Math.min(row.depth + 1, MAX_DEPTH) })));
  }
  return rows;
}

function summary(root, rows, copy) {
  const told = (key) => root.attributes[`tandem.${key}`];
  const phase = (name) => rows.filter(({ span }) => span.name === name && span.parent_span_id === root.span_id)
    .reduce((sum, { span }) => sum + (span.to - span.from) / 1e6, 0);
  const parts = ["queue", "route", "prefill"].map((name) => `${name} ${ms(phase(name))}`).join(" + ");
  const lines = [`${root.attributes["tandem.request_id"] ?? root.name}: ${whole(root.attributes["gen_ai.usage.input_tokens"])} prompt tokens, `
    + `${whole(root.attributes["gen_ai.usage.output_tokens"])} output tokens`];
  if (told("ttft_ms") !== undefined) lines.push(`TTFT ${ms(told("ttft_ms"))} ms = ${parts}`);
  if (told("route.plan") === "local") lines.push(`${told("decode.instance")} computed prompt and answer: no transfer`);
  if (told("kv.bytes") !== undefined) {
    lines.push(`transfer: ${ms(told("kv.hidden_ms"))} ms hidden behind the prefill, ${ms(told("kv.exposed_ms"))} ms exposed; `
      + `${bytes(told("kv.bytes"))} in ${whole(told("kv.blocks"))} blocks over ${told("kv.transport")}, ${ms(told("kv.gbps"))} GB/s`
      + (copy ? `; ${told("prefill.instance")} → ${told("decode.instance")}` : ""));
  }
  if (told("tpot_ms") !== undefined) {
    lines.push(`decode ${ms(phase("decode"))} ms: TPOT ${ms(told("tpot_ms"))} ms, ITL p50 ${ms(told("itl.p50_ms"))}, p99 ${ms(told("itl.p99_ms"))}, `
      + `max ${ms(told("itl.max_ms"))} ms, smoothness ${Number(told("smoothness") ?? 0).toFixed(3)}`);
  }
  if (told("replans")) lines.push(`re-planned ${told("replans")} times after failures`);
  const box = element("div", { class: "summary" }, ...lines.map((line) => element("div", {}, line)));
  if (root.error) box.append(element("div", { class: "bad" }, root.error));
  return box;
}

function bars(rows, exposedTail) {
  // Clocks of other hosts may put a span outside its root.
  const start = Math.min(...rows.map(({ span }) => span.from)), end = Math.max(...rows.map(({ span }) => span.to));
  const total = Math.max(1, end - start);
  const part = (kind, from, to) => {
    const bar = element("i", { class: kind });
    bar.style.left = `${(100 * (from - start)) / total}%`;
    bar.style.width = `${(100 * Math.max(0, to - from)) / total}%`;
    return bar;
  };
  const body = element("tbody");
  for (const { span, depth } of rows) {
    const track = element("div", { class: "track" });
    if (span.name === "kv.transfer" && exposedTail) {
      // What the computation hid, and what the client waited for.
      const border = Math.min(Math.max(exposedTail.from, span.from), span.to);
      track.append(part("hidden-part", span.from, border), part("exposed", border, span.to));
    } else {
      track.append(part(kindOf(span.name), span.from, span.to));
    }
    const name = element("th", { scope: "row", class: "text", title: span.error || span.name }, span.name);
    name.style.paddingLeft = `${8 + depth * 14}px`;
    if (span.error) name.classList.add("bad");
    body.append(element("tr", {}, name, element("td", { class: "quiet" }, span.instance || span.service),
      element("td", { class: "n" }, ms((span.from - start) / 1e6)), element("td", { class: "n" }, ms((span.to - span.from) / 1e6)),
      element("td", { class: "when" }, track)));
  }
  const heads = [["span", ""], ["where", ""], ["start ms", "n"], ["ms", "n"], ["", "when"]];
  const head = element("tr", {}, ...heads.map(([text, kind]) => element("th", { scope: "col", class: kind }, text)));
  return element("table", { class: "waterfall" }, element("thead", {}, head), body);
}

function kindOf(name) {
  if (name === "transfer") return "exposed";
  const first = name.split(".")[0];
  return ["queue", "route", "prefill", "decode"].includes(first) ? first : name === "kv.transfer" ? "hidden-part" : "other";
}

function candidates(route) {
  const events = (route?.events ?? []).filter((event) => event.name === "candidate");
  if (events.length === 0) return [];
  const heads = ["plan", ...TERMS.map(([name]) => name), "cached tok", ""];
  const head = element("tr", {}, ...heads.map((text, at) => element("th", { scope: "col", class: at && at < heads.length - 1 ? "n" : "" }, text)));
  const rows = events.slice(0, MAX_CANDIDATES).map(({ attributes }) => {
    const told = (key) => attributes[`tandem.route.${key}`];
    const prefill = attributes["tandem.prefill.instance"], decode = attributes["tandem.decode.instance"];
    const plan = told("plan") === "local" ? `${decode} alone` : `${prefill} → ${decode}`;
    const notes = [told("chosen") && "chosen", told("measured") === false && "guessed: nothing measured", told("breaker_shut") && "tried last",
      told("avoided") && "failed before", told("blocks_short") > 0 && `${told("blocks_short")} blocks short`].filter(Boolean);
    return element("tr", { class: told("chosen") ? "chosen" : "" }, element("td", {}, plan),
      ...TERMS.map(([, key]) => element("td", { class: "n" }, ms(told(key)))),
      element("td", { class: "n" }, whole(told("cached_tokens"))), element("td", { class: "quiet" }, notes.join(", ")));
  });
  const more = events.length > MAX_CANDIDATES ? ` (${MAX_CANDIDATES} of ${events.length})` : "";
  return [element("h3", {}, `Candidates of the route, predicted ms${more}`),
    element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Candidates" },
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)))];
}
