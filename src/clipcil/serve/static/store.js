// The state of the server as the page knows it: model, waiting pictures, lesson. Parts of the page watch it.

import { call } from "./api.js";

export const store = { model: null, waiting: [], lesson: null, added: [], uploading: new Map() };
const watchers = [];
export const watch = (watcher) => watchers.push(watcher);
export const changed = () => watchers.forEach((watcher) => watcher(store));

/** A name as the server will have it: single blanks, also in place of underscores. */
export const cleaned = (name) => name.normalize("NFC").replace(/[_\s\p{Cc}]+/gu, " ").trim();
// To capitals and back: as the server folds case, "Straße" is "STRASSE", and a sigma is one wherever it stands.
const key = (name) => cleaned(name.replace(/[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "")).toLowerCase().toUpperCase().toLowerCase();
export const same = (a, b) => key(a) === key(b);

export async function loadModel() {
  store.model = await call("GET", "/api/model");
  store.added = store.added.filter((name) => !store.model.classes.some((each) => same(each.name, name))); // renamed or forgotten later, it is gone
  changed();
}

export async function loadWaiting() {
  store.waiting = (await call("GET", "/api/waiting")).classes;
  changed();
}

/** All classes to show (known, waiting, or just named), each with the number of its colour. */
export function allClasses() {
  const found = new Map();
  const entry = (name) => {
    if (!found.has(key(name))) found.set(key(name), { name, known: null, pictures: [], uploading: 0, learning: 0, index: found.size });
    return found.get(key(name));
  };
  for (const known of store.model?.classes ?? []) entry(known.name).known = known;
  for (const waiting of store.waiting) entry(waiting.name).pictures = waiting.pictures;
  for (const name of store.added) entry(name);
  for (const [name, count] of store.uploading) entry(name).uploading = count;
  if (store.lesson?.state === "running") for (const [name, count] of Object.entries(store.lesson.classes)) entry(name).learning = count;
  return [...found.values()];
}

export const colourIndex = (name) => allClasses().find((each) => same(each.name, name))?.index ?? 0;

/** Call `action` soon, once for all calls that come until then. */
function soon(action, milliseconds) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => { timer = null; action().catch(() => {}); }, milliseconds);
  };
}

/** Follow changes made by this page, another page or a program. */
export function listen() {
  const events = new EventSource("/api/events");
  const model = soon(loadModel, 50);
  const waiting = soon(loadWaiting, 250);
  events.addEventListener("model", model);
  events.addEventListener("waiting", waiting);
  events.addEventListener("lesson", (event) => { store.lesson = JSON.parse(event.data); changed(); });
  events.addEventListener("open", () => { model(); waiting(); });
}
