// The state of the server as the page knows it: model, waiting pictures, lesson. Parts of the page watch it.

import { call } from "./api.js";
import { HUES } from "./dom.js";

export const store = { model: null, waiting: [], lesson: null, added: [], uploading: new Map(), lost: null };
const watchers = [];
export const watch = (watcher) => watchers.push(watcher);
export const changed = () => watchers.forEach((watcher) => watcher(store));

/** A name as the server will have it: single blanks, also in place of underscores. */
export const cleaned = (name) => name.normalize("NFC").replace(/[_\s\p{Cc}]+/gu, " ").trim();
// To capitals and back: as the server folds case, "Straße" is "STRASSE", and a sigma is one wherever it stands.
const key = (name) => cleaned(name.replace(/[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "")).toLowerCase().toUpperCase().toLowerCase();
export const same = (a, b) => key(a) === key(b);

const slots = new Map(); // the colour of each class, by its key

/** The colour slot of a class. It stays while the page is open, whatever else is learnt, renamed or forgotten. */
export function slotOf(name) {
  const own = key(name);
  if (!slots.has(own)) {
    if (slots.size >= 2 * HUES) { // those of classes that are gone are free again
      const shown = new Set(allClasses().map((each) => key(each.name)));
      for (const each of [...slots.keys()]) if (!shown.has(each)) slots.delete(each);
    }
    slots.set(own, freeSlot([...own].reduce((sum, letter) => (31 * sum + letter.codePointAt(0)) % 9973, 7), [...slots.values()]));
  }
  return slots.get(own);
}

/** A free slot near `start`, as far from the taken ones as can be; `start` itself when all are taken. */
function freeSlot(start, taken) {
  const apart = (one, other) => Math.min((one - other + HUES) % HUES, (other - one + HUES) % HUES);
  for (const tone of [0, 1]) {
    const hues = taken.filter((slot) => Math.floor(slot / HUES) === tone).map((slot) => slot % HUES);
    for (const wanted of [4, 3, 2, 1]) {
      for (let step = 0; step < HUES; step += 1) {
        const hue = (start + step) % HUES;
        if (hues.every((other) => apart(hue, other) >= wanted)) return HUES * tone + hue;
      }
    }
  }
  return start % (2 * HUES);
}

function keepColours(before, after) {
  const moved = before.length === after.length ? before.flatMap((old, i) => (same(old.name, after[i].name) ? [] : [i])) : [];
  if (moved.length === 1 && slots.has(key(before[moved[0]].name))) slots.set(key(after[moved[0]].name), slots.get(key(before[moved[0]].name))); // renamed
}

/** The address of a small picture that is kept of a class. */
export const keptPicture = (name, index = 0) => `/api/classes/picture?${new URLSearchParams({ name, index, revision: store.model.revision })}`;
/** How many small pictures are kept of a class. */
export const keptCount = (name) => store.model.classes.find((each) => same(each.name, name))?.small_pictures ?? 0;

export async function loadModel() {
  const before = store.model;
  store.model = await call("GET", "/api/model");
  keepColours(before?.classes ?? [], store.model.classes);
  store.model.classes.forEach((each) => slotOf(each.name)); // in this order, so that a reload gives the same colours
  store.added = store.added.filter((name) => !store.model.classes.some((each) => same(each.name, name))); // renamed or forgotten later, it is gone
  changed();
}

export async function loadWaiting() {
  store.waiting = (await call("GET", "/api/waiting")).classes;
  changed();
}

/** All classes to show (known, waiting, or just named), the newest last. */
export function allClasses() {
  const found = new Map();
  const entry = (name) => {
    if (!found.has(key(name))) found.set(key(name), { name, known: null, pictures: [], uploading: 0, learning: 0 });
    return found.get(key(name));
  };
  for (const known of store.model?.classes ?? []) entry(known.name).known = known;
  for (const waiting of store.waiting) entry(waiting.name).pictures = waiting.pictures;
  for (const name of store.added) entry(name);
  for (const [name, count] of store.uploading) entry(name).uploading = count;
  if (store.lesson?.state === "running") for (const [name, count] of Object.entries(store.lesson.classes)) entry(name).learning = count;
  return [...found.values()];
}

/** Call `action` soon, once for all calls that come until then. */
function soon(action, milliseconds) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => { timer = null; action().catch(() => {}); }, milliseconds);
  };
}

/** Ask the server for a sign of life; what is wrong, if anything, is shown until the events flow again. */
async function look() {
  try {
    await call("GET", "/api/health");
  } catch (error) {
    store.lost = error.status ? `${error.message[0].toUpperCase()}${error.message.slice(1)}.` : "";
    if (store.lesson?.state === "running") store.lesson = null;
    changed();
  }
}

/** Follow changes made by this page, another page or a program; go on by itself when the server is back. */
export function listen() {
  const events = new EventSource("/api/events");
  const model = soon(loadModel, 50);
  const waiting = soon(loadWaiting, 250);
  events.addEventListener("model", model);
  events.addEventListener("waiting", waiting);
  events.addEventListener("lesson", (event) => { store.lesson = JSON.parse(event.data); changed(); });
  events.addEventListener("open", () => { store.lost = null; changed(); model(); waiting(); });
  events.addEventListener("error", () => {
    look();
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000); // refused: the browser does not try again
  });
}
