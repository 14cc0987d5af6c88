// Building the page. No string is ever parsed as HTML.

export const HUES = 24;
export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  close: "M6 6l12 12M18 6 6 18",
  camera: "M4 8h3l2-3h6l2 3h3v11H4zM12 17a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7z",
  add: "M4 6h11v11H4zM4 14l3.5-3.5L13 16M19 11v9M14.5 20H19M19 20h0M19 15h0",
  plus: "M12 5v14M5 12h14",
  more: "M5 12h.01M12 12h.01M19 12h.01",
};

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "own") element.style.setProperty("--own", value);
    else if (key === "width%") element.style.width = `${value}%`;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const icon = (name) => s("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d: PATHS[name] }));

/** Replace the children, but only if they differ, so that focus and screen readers are not disturbed. */
export function show(element, ...children) {
  const fresh = h("div", {}, ...children);
  if (element.dataset.shown === undefined || ![...element.childNodes].every((node, i) => node.isEqualNode(fresh.childNodes[i]))
      || element.childNodes.length !== fresh.childNodes.length) {
    element.replaceChildren(...fresh.childNodes);
    element.dataset.shown = "";
  }
}

/** Make the children of `parent` those of `items`, keeping the elements of items that stay: pictures stay loaded, focus stays. */
export function sync(parent, items, key, make) {
  const keys = new Set(items.map(key));
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  for (const [name, child] of old) if (!keys.has(name)) child.remove();
  let place = parent.firstElementChild;
  for (const item of items) {
    const child = old.get(key(item)) ?? make(item);
    child.dataset.key = key(item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A short message, shown for some seconds and read out by screen readers. */
export function tell(text, bad = false) {
  const toast = h("div", { class: bad ? "toast bad" : "toast" }, text);
  byId("toasts").append(toast);
  setTimeout(() => toast.remove(), bad ? 9000 : 5000);
}

/** Run `action`; show the reason if it fails. Returns whether it succeeded. */
export async function attempt(action) {
  try {
    await action();
    return true;
  } catch (error) {
    tell(error.message, true);
    return false;
  }
}

export const plural = (count, word, many = `${word}s`) => `${count} ${count === 1 ? word : many}`;
/** Whole percents; a share close to 0 or 1 is not rounded to it. */
export const percent = (share) => (share > 0.995 && share < 1 ? ">\u00a099\u00a0%" : share > 0 && share < 0.005 ? "<\u00a01\u00a0%" : `${Math.round(100 * share)}\u00a0%`);
export const day = (text) => {
  const date = new Date(/^\d{4}-\d{2}-\d{2}$/.test(text) ? `${text}T00:00` : text); // a day alone would be midnight in Greenwich: west of it, the day before
  const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return Number.isNaN(date.getTime()) ? text : date.toLocaleDateString(undefined, { day: "numeric", month: "short", year });
};
/** The colour of a slot: 24 hues, first in one tone, then in another. */
export const colour = (slot) => `oklch(var(--tone${Math.floor(slot / HUES) % 2}) ${15 * (slot % HUES) + 5})`;
