// The cluster as it is: figures, nodes, links, and the tail of TTFT. Elements are made once and then only written to:
// a hundred nodes change every second.
import { byId, bytes, drawn, element, ms, rate, time, whole, write } from "./elements.js";

/** A node that left is shown for so long. */
const GONE_MS = 300_000;

const FIGURES = [
  ["running", (c) => whole(c.running)],
  ["in the queue", (c) => whole(c.queued)],
  ["requests/s", (c) => rate(c.requests_per_s)],
  ["output tok/s", (c) => rate(c.output_tokens_per_s)],
  ["prompt tok/s", (c) => rate(c.prompt_tokens_per_s)],
  ["KV moved/s", (c) => bytes(c.kv_bytes_per_s ?? 0)],
  ["state", (c) => (c.draining ? "draining" : c.ready ? "serves" : "no nodes to serve with")],
];

export class Figures {
  #values = FIGURES.map(([name]) => {
    const value = element("dd");
    byId("figures").append(element("div", {}, element("dt", {}, name), value));
    return value;
  });

  show(cluster) {
    FIGURES.forEach(([, text], at) => write(this.#values[at], text(cluster)));
  }
}

const COLUMNS = ["running", "waiting", "queued_tokens", "backlog_ms", "prompt_tokens_per_s", "output_tokens_per_s"];
const FORMATS = { backlog_ms: (value) => (value ? `${ms(value)} ms` : "0"), prompt_tokens_per_s: rate, output_tokens_per_s: rate };

class NodeRow {
  constructor(node) {
    this.node = node;
    this.id = element("th", { scope: "row" }, node.id);
    this.state = element("td");
    this.bar = element("div", { class: "bar", role: "img" }, element("i", { class: "kv-used" }), element("i", { class: "kv-cached" }));
    this.kv = element("span");
    this.cells = COLUMNS.map(() => element("td", { class: "n" }));
    this.transport = element("td");
    const kv = element("td", {}, element("div", { class: "kv" }, this.bar, this.kv));
    this.row = element("tr", {}, this.id, element("td", {}, node.role), this.state, kv, ...this.cells, this.transport);
  }

  /** Fields that changed, or all of them. */
  show(changed) {
    const node = Object.assign(this.node, changed);
    if ("state" in changed || "silent_ms" in changed) {
      this.state.dataset.state = node.state;
      write(this.state, node.silent_ms ? `${node.state}, silent ${(node.silent_ms / 1000).toFixed(1)} s` : node.state);
    }
    if ("free_blocks" in changed || "cached_blocks" in changed || "total_blocks" in changed) this.#showKv(node);
    COLUMNS.forEach((name, at) => {
      if (name in changed) write(this.cells[at], (FORMATS[name] ?? whole)(node[name]));
    });
    if ("transport" in changed) write(this.transport, node.transport);
  }

  #showKv(node) {
    const used = node.total_blocks - node.free_blocks;
    const share = (blocks) => `${(100 * blocks) / Math.max(1, node.total_blocks)}%`;
    this.bar.children[0].style.width = share(used);
    this.bar.children[1].style.width = share(node.cached_blocks);
    write(this.kv, `${whole(used)} / ${whole(node.total_blocks)}`);
    this.bar.setAttribute("aria-label", `${used} of ${node.total_blocks} KV blocks in use, ${node.cached_blocks} cached`);
  }
}

export class Nodes {
  #body = byId("nodes").tBodies[0];
  #rows = new Map();
  #gone = new Map();

  /** Everything anew. */
  reset(nodes) {
    this.#rows.clear();
    this.#gone.clear();
    this.#body.replaceChildren();
    this.change(nodes);
  }

  change(nodes) {
    for (const node of nodes) {
      let row = this.#rows.get(node.id);
      // Another life of it: nothing of the old one holds.
      if (row && node.role && node.role !== row.node.role) { this.remove([node.id]); row = undefined; }
      if (!row) {
        row = new NodeRow(node);
        this.#rows.set(node.id, row);
        this.#insert(row);
      }
      row.show(node);
    }
    byId("nodes-none").hidden = this.#rows.size > 0;
  }

  remove(ids) {
    for (const id of ids) {
      this.#rows.get(id)?.row.remove();
      this.#rows.delete(id);
    }
    byId("nodes-none").hidden = this.#rows.size > 0;
  }

  /** Those that left and did not come back, with the reason. */
  showGone(departed, nowMs) {
    const wanted = new Map();
    for (const node of departed) {
      const old = nowMs - node.at_ms > GONE_MS || this.#rows.has(node.id);
      if (!old && !wanted.has(node.id)) wanted.set(node.id, node);
    }
    for (const [id, shown] of this.#gone) {
      if (wanted.get(id)?.at_ms === shown.at_ms) continue;
      shown.row.remove();
      this.#gone.delete(id);
    }
    for (const [id, node] of wanted) {
      if (this.#gone.has(id)) continue;
      const why = element("td", { colspan: 8, class: "quiet" }, `${node.why}, ${time(node.at_ms)}`);
      const state = element("td", { "data-state": "gone" }, "gone");
      const row = element("tr", { class: "gone" }, element("th", { scope: "row" }, id), element("td", {}, node.role), state, why);
      this.#gone.set(id, { row, at_ms: node.at_ms });
      this.#body.append(row);
    }
  }

  /** By role and name; prefill-10 comes behind prefill-9. */
  #insert(row) {
    const key = (node) => `${node.role === "prefill" ? 0 : 1} ${node.id}`;
    const order = (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
    const next = [...this.#rows.values()].filter((other) => other !== row && order(other.node, row.node) > 0);
    next.sort((a, b) => order(a.node, b.node));
    this.#body.insertBefore(row.row, next[0]?.row ?? this.#body.querySelector(".gone"));
  }
}

export class Links {
  #body = byId("links").tBodies[0];

  show(links, total) {
    while (this.#body.rows.length > links.length) this.#body.deleteRow(-1);
    links.forEach((link, at) => {
      const row = this.#body.rows[at] ?? this.#body.appendChild(element("tr", {}, element("td"), element("td"),
        ...Array.from({ length: 4 }, () => element("td", { class: "n" }))));
      const texts = [link.prefill, link.decode, rate(link.gbps), rate(link.bytes_per_s / 1e6), whole(link.handoffs), bytes(link.bytes)];
      texts.forEach((text, cell) => write(row.cells[cell], text));
    });
    byId("links-none").hidden = links.length > 0;
    write(byId("links-title"), total > links.length ? `KV links: the ${links.length} busiest of ${whole(total)}` : "KV links");
  }
}

const STRETCH_MS = 10_000, STRETCHES = 30;
const CHART = { width: 600, height: 150, left: 46, bottom: 16, top: 6 };

/** `open(trace)` is called for the bar that is chosen. */
export class Tail {
  #open;

  constructor(open) {
    this.#open = open;
  }

  show(stretches, nowMs) {
    byId("tail-none").hidden = stretches.length > 0;
    if (stretches.length === 0) { byId("tail").replaceChildren(); return; }
    const { width, height, left, bottom, top } = CHART;
    const most = ceiling(Math.max(...stretches.map((stretch) => stretch.ttft_ms)));
    const plot = height - bottom - top, slot = (width - left) / STRETCHES;
    const y = (value) => top + plot * (1 - value / most);
    const chart = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", preserveAspectRatio: "none",
      "aria-label": "TTFT p99 by phase for each ten seconds" });
    for (const value of [0, most / 2, most]) {
      chart.append(drawn("line", { x1: left, x2: width, y1: y(value), y2: y(value) }));
      chart.append(drawn("text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" }, `${ms(value)} ms`));
    }
    const last = Math.floor(nowMs / STRETCH_MS);
    for (const stretch of stretches) {
      const place = STRETCHES - 1 - (last - Math.floor(stretch.at_ms / STRETCH_MS));
      if (place >= 0 && place < STRETCHES) chart.append(this.#bar(stretch, left + place * slot, slot, y, top, plot));
    }
    for (const [minutes, at] of [[-5, 0], [-2.5, STRETCHES / 2], [0, STRETCHES]]) {
      const anchor = at === 0 ? "start" : at === STRETCHES ? "end" : "middle";
      chart.append(drawn("text", { x: left + at * slot, y: height - 4, "text-anchor": anchor }, minutes ? `${minutes} min` : "now"));
    }
    // What is focused stays so.
    const focused = byId("tail").contains(document.activeElement) ? document.activeElement.dataset.at : null;
    byId("tail").replaceChildren(chart);
    if (focused) chart.querySelector(`[data-at="${focused}"]`)?.focus();
  }

  #bar(stretch, x, slot, y, top, plot) {
    const phases = ["queue", "route", "prefill"];
    const parts = phases.map((phase) => `${phase} ${ms(stretch[`${phase}_ms`])} ms`).join(", ");
    const label = `${time(stretch.at_ms)}: TTFT p99 ${ms(stretch.ttft_ms)} ms of ${stretch.requests} requests: ${parts}`;
    const bar = drawn("g", { tabindex: 0, role: "button", "aria-label": label, "data-at": stretch.at_ms });
    bar.append(drawn("title", {}, label), drawn("rect", { class: "hit", x, y: top, width: slot, height: plot }));
    let from = 0;
    for (const phase of phases) {
      const value = stretch[`${phase}_ms`];
      const height = Math.max(0, y(from) - y(from + value));
      bar.append(drawn("rect", { class: `of-${phase}`, x: x + 1, y: y(from + value), width: slot - 2, height }));
      from += value;
    }
    bar.addEventListener("click", () => this.#open(stretch.trace));
    bar.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); this.#open(stretch.trace); }
    });
    return bar;
  }
}

/** The next of 1, 2, 5, 10, … */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 0.01)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
