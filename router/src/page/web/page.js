// The live page begins here: the stream's events become what is shown, and keys and buttons what is done.
import { Figures, Links, Nodes, Tail } from "./cluster.js";
import { byId, element, write } from "./elements.js";
import { Requests } from "./requests.js";
import { Stream, reason } from "./stream.js";
import { waterfall } from "./waterfall.js";

const KEY = "tandem-api-key", THEME = "tandem-theme";
const THEMES = ["auto", "light", "dark"];

const figures = new Figures(), nodes = new Nodes(), links = new Links();
const tail = new Tail((trace) => open(trace, ""));
const requests = new Requests((trace, request) => open(trace, request));
const stream = new Stream({ event: take, state: connection, keyWanted });

/** What the router said last. */
const seen = { at_ms: 0, about: {}, cluster: {}, links: [], departed: [], tail: [] };
let opened = { trace: "", request: "" };

function take(data) {
  if (data.kind === "older") { requests.older(data.requests); return; }
  if (data.kind === "whole") {
    for (const row of ["cluster", "links", "departed", "tail", "about"]) seen[row] = data[row];
    nodes.reset(data.nodes);
    requests.reset(data.requests);
    const { model, version } = seen.about;
    write(byId("model"), `${model}, router ${version}`);
    document.title = `Tandem: ${model}`;
  } else {
    Object.assign(seen.cluster, data.cluster);
    for (const list of ["links", "departed", "tail"]) if (data[list]) seen[list] = data[list];
    nodes.remove(data.gone ?? []);
    nodes.change(data.nodes ?? []);
    if (data.requests) requests.add(data.requests);
  }
  seen.at_ms = data.at_ms;
  figures.show(seen.cluster);
  links.show(seen.links, seen.cluster.links ?? 0);
  nodes.showGone(seen.departed, seen.at_ms);
  if (data.kind === "whole" || data.tail || seen.at_ms - shownTailMs > 10_000) {
    tail.show(seen.tail, seen.at_ms);
    shownTailMs = seen.at_ms;
  }
}
let shownTailMs = 0;

function connection(state, why) {
  const at = byId("connection");
  at.dataset.state = state;
  write(at, { live: "live", connecting: "connecting", lost: "connection lost" }[state]);
  byId("lost").hidden = state !== "lost";
  byId("main").classList.toggle("stale", state === "lost");
  if (state === "lost") write(byId("lost"), `No connection to the router: ${why}. What is below may be old. Connecting again.`);
  if (state === "live") { byId("key-form").hidden = true; byId("main").hidden = false; }
}

function keyWanted() {
  const tried = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  byId("key-form").hidden = false;
  byId("main").hidden = true;
  byId("lost").hidden = true;
  write(byId("key-wrong"), tried ? "The router does not know this key." : "");
  write(byId("connection"), "an API key is needed");
  byId("connection").dataset.state = "connecting";
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  sessionStorage.setItem(KEY, key);
  stream.open(key);
});

/** Shows one request, and says so in the address, which can be sent to somebody. */
function open(trace, request) {
  const hash = `#trace=${trace}${request ? `&request=${request}` : ""}`;
  if (location.hash === hash) show(); else location.hash = hash;
}

function close() {
  if (byId("request").hidden) return;
  history.replaceState(null, "", location.pathname + location.search);
  show();
  requests.focus();
}

async function show() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const trace = asked.get("trace") ?? "";
  opened = { trace, request: asked.get("request") ?? "" };
  byId("request").hidden = !trace;
  byId("jaeger").hidden = true;
  if (!trace) return;
  const body = byId("request-body"), { request } = opened;
  try {
    const answer = await fetch(`page/traces/${encodeURIComponent(trace)}`, { headers: stream.headers(), cache: "no-store" });
    if (!answer.ok) throw new Error(await reason(answer));
    const told = await answer.json();
    if (opened.trace !== trace || opened.request !== request) return;
    body.replaceChildren(...waterfall(told, request));
    const jaeger = byId("jaeger");
    jaeger.hidden = !/^https?:/.test(told.jaeger ?? "");
    if (!jaeger.hidden) jaeger.href = told.jaeger;
  } catch (error) {
    body.replaceChildren(element("p", { class: "bad" }, `The trace cannot be shown: ${error.message}`));
  }
  byId("request").focus({ preventScroll: true });
  byId("request").scrollIntoView({ block: "nearest" });
}

window.addEventListener("hashchange", show);
byId("request-close").addEventListener("click", close);

function theme(next) {
  const now = next ?? (localStorage.getItem(THEME) || "auto");
  localStorage.setItem(THEME, now);
  if (now === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = now;
  write(byId("theme"), `theme: ${now}`);
}
const nextTheme = () => theme(THEMES[(THEMES.indexOf(localStorage.getItem(THEME) || "auto") + 1) % THEMES.length]);
byId("theme").addEventListener("click", nextTheme);
byId("help-open").addEventListener("click", () => byId("help").showModal());

const KEYS = {
  j: () => requests.step(1), ArrowDown: () => requests.step(1),
  k: () => requests.step(-1), ArrowUp: () => requests.step(-1),
  Enter: () => requests.enter(), Escape: close,
  "/": () => byId("find").focus(), p: () => requests.hold(!requests.held),
  t: nextTheme, "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const at = event.target.closest?.("input, select, button, a");
  if (at && event.key === "Escape" && at.matches("input")) { at.blur(); return; }
  // Keys of a field, a button or a link are its own.
  if (at && (at.matches("input, select") || event.key === "Enter")) return;
  // Arrows scroll what is scrolled by them, unless a request is chosen.
  if (event.key.startsWith("Arrow") && event.target.closest?.(".scroll") && !event.target.closest("#list tr")) return;
  const does = KEYS[event.key];
  if (does) { event.preventDefault(); does(); }
});

theme();
connection("connecting", "");
stream.open(sessionStorage.getItem(KEY));
show();
