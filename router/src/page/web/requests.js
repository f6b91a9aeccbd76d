// The recent requests: the list, its filters, and which of them is chosen.
import { byId, element, ms, time, whole, write } from "./elements.js";

/** Requests that are kept, as many as the router keeps. */
const KEPT = 1000;
/** Of those, what the list shows. */
const SHOWN = 200;

const PHASES = [["queue", "queue_ms"], ["route", "route_ms"], ["prefill", "prefill_ms"], ["exposed", "exposed_ms"], ["decode", "decode_ms"]];
const ANSWERED = ["stop", "length", "ended"];

const isFailed = (row) => row.error !== "" || !ANSWERED.includes(row.outcome);

/** `open(trace, request)` is called for the one that is opened. */
export class Requests {
  #body = byId("list").tBodies[0];
  #open;
  /** The newest first. */
  #rows = [];
  /** Elements by id; those of the list alone. */
  #shown = new Map();
  #chosen = null;
  #held = false;
  #missed = 0;

  constructor(open) {
    this.#open = open;
    for (const id of ["find", "outcome", "plan", "slow"]) byId(id).addEventListener("input", () => this.#list());
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("hold").addEventListener("click", () => this.hold(!this.#held));
    this.#body.addEventListener("click", (event) => this.#openAt(event.target.closest("tr")));
    this.#body.addEventListener("focusin", (event) => this.#choose(event.target.closest("tr")));
  }

  /** Everything anew. */
  reset(rows) {
    this.#rows = rows.slice(0, KEPT);
    this.#list();
  }

  /** Older ones, behind all others. */
  older(rows) {
    this.#rows = this.#rows.concat(rows).slice(0, KEPT);
    if (this.#shown.size < SHOWN) this.#list(); else this.#count();
  }

  /** New ones, the newest first. */
  add(rows) {
    this.#rows = rows.concat(this.#rows).slice(0, KEPT);
    if (this.#held) { this.#missed += rows.length; this.#count(); return; }
    const matches = this.#filter();
    const wanted = rows.filter(matches).slice(0, SHOWN);
    for (const row of wanted.reverse()) this.#body.prepend(this.#element(row));
    while (this.#body.rows.length > SHOWN) {
      const last = this.#body.lastElementChild;
      this.#shown.delete(last.dataset.id);
      last.remove();
    }
    this.#count();
  }

  /** The list stands still, and goes on where it would be. */
  hold(held) {
    this.#held = held;
    byId("hold").setAttribute("aria-pressed", String(held));
    if (!held) { this.#missed = 0; this.#list(); } else { this.#count(); }
  }

  get held() {
    return this.#held;
  }

  /** Chooses the next (1) or the one before (-1), and shows it. */
  step(by) {
    const rows = this.#body.rows;
    if (rows.length === 0) return;
    const at = this.#chosen ? [...rows].findIndex((row) => row.dataset.id === this.#chosen) : -1;
    const next = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
    this.#choose(next);
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  }

  /** Opens the chosen one. */
  enter() {
    this.#openAt([...this.#body.rows].find((row) => row.dataset.id === this.#chosen));
  }

  /** The cursor goes back to the list. */
  focus() {
    [...this.#body.rows].find((row) => row.dataset.id === this.#chosen)?.focus();
  }

  #openAt(row) {
    const of = row && this.#shown.get(row.dataset.id);
    if (!of) return;
    this.#choose(row);
    this.#open(of.trace, of.id);
  }

  #choose(row) {
    if (!row || row.dataset.id === this.#chosen) return;
    for (const other of this.#body.querySelectorAll('[aria-selected="true"]')) this.#mark(other, false);
    this.#chosen = row.dataset.id;
    this.#mark(row, true);
  }

  #mark(row, chosen) {
    row.setAttribute("aria-selected", String(chosen));
    row.tabIndex = chosen ? 0 : -1;
  }

  #filter() {
    const find = byId("find").value.trim().toLowerCase(), outcome = byId("outcome").value, plan = byId("plan").value;
    const slow = Number(byId("slow").value) || 0;
    const has = (row) => [row.request, row.trace, row.prefill, row.decode, row.error, row.outcome].some((text) => text.toLowerCase().includes(find));
    return (row) => (!find || has(row)) && (!plan || row.plan === plan) && (!slow || (row.ttft_ms ?? 0) >= slow)
      && (!outcome || (outcome === "replanned" ? row.replans > 0 : isFailed(row) === (outcome === "failed")));
  }

  #list() {
    this.#shown.clear();
    const wanted = this.#rows.filter(this.#filter()).slice(0, SHOWN);
    this.#body.replaceChildren(...wanted.map((row) => this.#element(row)));
    this.#count();
  }

  #count() {
    const matching = this.#rows.filter(this.#filter()).length;
    const shown = this.#body.rows.length;
    const paused = this.#held ? `, paused: ${whole(this.#missed)} more` : "";
    write(byId("shown"), `${whole(shown)} shown, ${whole(matching)} match, ${whole(this.#rows.length)} kept${paused}`);
    // Somewhere to begin with the Tab key.
    if (shown && !this.#body.querySelector('[tabindex="0"]')) this.#body.rows[0].tabIndex = 0;
  }

  #element(row) {
    this.#shown.set(row.id, row);
    const nodes = row.plan === "local" ? `${row.decode} alone` : row.prefill ? `${row.prefill} → ${row.decode}` : "–";
    const again = row.replans ? `, re-planned ${row.replans}×` : "";
    const text = (content) => element("td", { class: "text", title: content }, content);
    const count = (content) => element("td", { class: "n" }, content);
    const made = element("tr", { "data-id": row.id, tabindex: -1, "aria-selected": "false" },
      element("td", {}, time(row.at_ms + row.e2e_ms)), text(row.request), text(nodes),
      count(whole(row.prompt_tokens)), count(whole(row.output_tokens)), element("td", {}, phases(row)),
      count(ms(row.ttft_ms)), count(ms(row.tpot_ms)), count(ms(row.e2e_ms)),
      element("td", { class: "outcome text", title: row.error || row.outcome }, `${row.outcome}${again}`));
    if (isFailed(row)) made.className = "failed";
    if (row.id === this.#chosen) this.#mark(made, true);
    return made;
  }
}

/** The phases of a request, as parts of the whole. */
function phases(row) {
  const label = PHASES.map(([name, field]) => `${name} ${ms(row[field])} ms`).join(", ");
  const bar = element("div", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const [name, field] of PHASES) {
    if (!row[field]) continue;
    const part = element("i", { class: name });
    part.style.width = `${(100 * row[field]) / Math.max(row.e2e_ms, 0.001)}%`;
    bar.append(part);
  }
  return bar;
}
