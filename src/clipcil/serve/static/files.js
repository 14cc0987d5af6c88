// From dropped or chosen files to pictures with class names, and their upload.

import { callPatiently } from "./api.js";
import { plural, tell } from "./dom.js";
import { changed, loadWaiting, store } from "./store.js";

const PICTURE = /\.(jpe?g|jpe|jfif|png|webp|bmp|gif|tiff?|ppm|pgm|pbm|avif|heic|heif)$/i;
const isPicture = (file) => file.type.startsWith("image/") || PICTURE.test(file.name);

/** Files of a drop with their paths, folders opened. Must be called while the drop event lasts. */
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].filter((item) => item.kind === "file").map((item) => item.webkitGetAsEntry?.() ?? item.getAsFile());
  const found = [];
  for (const entry of entries) if (entry) await gather(entry, "", found);
  return found;
}

async function gather(entry, path, found) {
  if (entry instanceof File) found.push({ file: entry, path: entry.name });
  else if (entry.isFile) {
    const file = await new Promise((done) => entry.file(done, () => done(null)));
    if (file) found.push({ file, path: `${path}${entry.name}` });
  } else if (entry.isDirectory) {
    const reader = entry.createReader();
    for (;;) { // a reader hands out a hundred entries at a time
      const some = await new Promise((done) => reader.readEntries(done, () => done([])));
      if (!some.length) break;
      for (const inner of some) await gather(inner, `${path}${entry.name}/`, found);
    }
  }
}

export const chosenFiles = (input) => [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name }));

/** Only the pictures; says how many other files were skipped. */
export function picturesOf(found) {
  const pictures = found.filter(({ file, path }) => isPicture(file) && !path.split("/").some((part) => part.startsWith(".")));
  const others = found.length - pictures.length;
  if (others) tell(`${plural(others, "file")} skipped: no picture${others > 1 ? "s" : ""}`);
  return pictures.map(({ file, path }) => ({ file, path }));
}

/** `{name: [files]}`: a folder is a class, a folder of folders several; loose pictures stand under the empty name. */
export function byClass(pictures) {
  const nested = new Set(pictures.map(({ path }) => path.split("/")).filter((parts) => parts.length > 2).map((parts) => parts[0]));
  const classes = new Map();
  let beside = 0;
  for (const { file, path } of pictures) {
    const parts = path.split("/");
    if (parts.length === 2 && nested.has(parts[0])) { beside += 1; continue; }
    const name = parts.length === 1 ? "" : nested.has(parts[0]) ? parts[1] : parts[0];
    classes.set(name, [...(classes.get(name) ?? []), file]);
  }
  if (beside) tell(`${plural(beside, "picture")} skipped: not in a class folder`);
  return classes;
}

const jobs = [];
let working = 0;

/** Upload pictures that wait to be taught as the class `name`; several at a time, tried again while the server is busy. */
export function send(name, files) {
  const limits = store.model.limits;
  let batch = [], bytes = 0;
  const flush = () => { if (batch.length) jobs.push({ name, files: batch }); batch = []; bytes = 0; };
  for (const file of files) {
    if (batch.length >= Math.min(16, limits.request_pictures) || bytes + file.size > limits.request_bytes / 8) flush();
    batch.push(file);
    bytes += file.size;
  }
  flush();
  count(name, files.length);
  while (working < 2 && jobs.length) work();
}

function count(name, more) {
  const now = (store.uploading.get(name) ?? 0) + more;
  if (now > 0) store.uploading.set(name, now);
  else store.uploading.delete(name);
  changed();
}

async function work() {
  working += 1;
  while (jobs.length) {
    const { name, files } = jobs.shift();
    const form = new FormData();
    form.append("name", name);
    const large = files.filter((file) => file.size > store.model.limits.picture_bytes);
    files.filter((file) => !large.includes(file)).forEach((file) => form.append("pictures", file, file.name || "picture"));
    if (large.length) tell(`${large[0].name} is too large`, true);
    try {
      if (form.has("pictures")) await callPatiently("POST", "/api/waiting", form);
    } catch (error) {
      tell(error.message, true);
    }
    await loadWaiting().catch(() => {});
    count(name, -files.length);
  }
  working -= 1;
}

/** Make an element take files that are dropped on it. */
export function takesDrops(element, take) {
  let depth = 0;
  const files = (event) => [...event.dataTransfer.types].includes("Files");
  const over = (by) => { depth = Math.max(0, depth + by); element.classList.toggle("over", depth > 0); };
  element.addEventListener("dragenter", (event) => { if (files(event)) { event.preventDefault(); over(1); } });
  element.addEventListener("dragover", (event) => { if (files(event)) event.preventDefault(); });
  element.addEventListener("dragleave", () => over(-1));
  element.addEventListener("drop", async (event) => {
    if (!files(event)) return;
    event.preventDefault();
    event.stopPropagation();
    depth = 0;
    over(0);
    take(await droppedFiles(event.dataTransfer));
  });
}
