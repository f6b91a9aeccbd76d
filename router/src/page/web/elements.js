// Elements and numbers. What comes from outside becomes text and nothing else: `textContent`, never markup.

/** An element with properties (`class`, `title`, `data-…`, …) and children, which are elements or text. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** An element of SVG. */
export function drawn(tag, properties = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

/** Writes text where it is another one: the rest of the page need not be looked at again. */
export function write(node, text) {
  const first = node.firstChild;
  if (first && first === node.lastChild && first.nodeType === Node.TEXT_NODE) {
    if (first.data !== text) first.data = text;
  } else {
    node.textContent = text;
  }
}

export const byId = (id) => document.getElementById(id);

const THOUSANDS = /\B(?=(\d{3})+$)/g;

/** 12,345 */
export const whole = (value) => String(Math.round(value ?? 0)).replace(THOUSANDS, ",");

/** Three figures, for rates. */
export function rate(value) {
  if (!value) return "0";
  if (value >= 100) return whole(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** Milliseconds, finer where they are few. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return whole(value);
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
}

/** 3.2 MB, by powers of ten. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

/** 14:03:07 of the reader's day. */
export function time(unixMs) {
  const at = new Date(unixMs);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}
