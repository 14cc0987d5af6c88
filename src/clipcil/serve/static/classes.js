// The first column: the classes, their waiting pictures, and adding pictures.

import { call } from "./api.js";
import { closeCamera, frame, isOpen, openCamera, whileHeld } from "./camera.js";
import { ask } from "./dialog.js";
import { attempt, byId, colour, day, h, icon, plural, setText, show, sync, tell } from "./dom.js";
import { byClass, chosenFiles, picturesOf, send, takesDrops } from "./files.js";
import { allClasses, changed, cleaned, keptPicture, loadWaiting, same, slotOf, store, watch } from "./store.js";

const SHOWN = 40; // thumbnails of a class before "more"
const MANY = 12; // classes from which on they can be searched and are shown as rows
const cards = new Map(); // by the name they show

export function startClasses() {
  byId("new-class").addEventListener("submit", (event) => { event.preventDefault(); addNamed(); });
  byId("choose-files").addEventListener("click", () => byId("files").click());
  byId("choose-folder").addEventListener("click", () => byId("folder").click());
  for (const id of ["files", "folder"]) byId(id).addEventListener("change", () => { takeMany(chosenFiles(byId(id))); byId(id).value = ""; });
  byId("filter").addEventListener("input", render);
  takesDrops(byId("new-class"), takeMany);
  watch(render);
}

function addNamed() {
  const input = byId("new-name"), name = cleaned(input.value);
  if (!name) return input.focus();
  input.value = "";
  if (!allClasses().some((each) => same(each.name, name))) store.added.push(name);
  changed();
  const card = cards.get(allClasses().find((each) => same(each.name, name)).name);
  card?.add.focus();
  card?.root.scrollIntoView({ block: "nearest" });
}

async function takeMany(found) {
  for (const [folder, files] of byClass(picturesOf(found))) {
    let name = folder;
    if (!name) {
      name = byId("new-name").value.trim()
        || await ask({ title: `What ${files.length === 1 ? "does this picture" : `do these ${files.length} pictures`} show?`, label: "Name of the class", yes: "Add" });
      byId("new-name").value = "";
    }
    if (cleaned(name ?? "")) send(cleaned(name), files);
  }
}

function render() {
  const classes = allClasses(), wanted = byId("filter").value.trim().toLowerCase(), list = byId("class-list");
  byId("filter-row").hidden = classes.length < MANY && !wanted;
  setText(byId("classes-count"), classes.length ? `${plural(classes.length, "class", "classes")}` : "");
  byId("start-hint").hidden = classes.length > 0;
  byId("new-class").classList.toggle("small-drop", classes.length > 0);
  list.classList.toggle("rows", classes.length >= MANY);
  for (const [key, card] of cards) if (!classes.some((each) => each.name === key)) { card.close(); cards.delete(key); }
  // The newest first, and never in another order: a card that moved would take focus and camera away from the person.
  const sorted = classes.filter((each) => each.name.toLowerCase().includes(wanted)).reverse();
  sync(list, sorted, (each) => each.name, (each) => {
    if (!cards.has(each.name)) cards.set(each.name, makeCard(each.name));
    return cards.get(each.name).root;
  });
  for (const each of sorted) cards.get(each.name).update(each);
}

function makeCard(name) {
  let all = false;
  const input = h("input", { type: "file", accept: "image/*,.heic,.heif", multiple: true, hidden: true });
  const add = h("button", { class: "icon-button", type: "button", "aria-label": `Add pictures to ${name}`, title: "Add pictures", onclick: () => input.click() }, icon("plus"));
  const film = h("button", { class: "icon-button", type: "button", "aria-label": `Take pictures of ${name} with the camera`, title: "Camera", "aria-pressed": "false", onclick: () => toggleCamera() }, icon("camera"));
  const menu = h("details", { class: "menu" });
  const title = h("h3", { class: "class-name" }, name);
  const line = h("p", { class: "quiet" }), told = h("div", { class: "told", hidden: true }, h("span"));
  const kept = h("div", { class: "kept" }), box = h("div", { class: "camera-box", hidden: true });
  const pill = h("span", { class: "pill" });
  const thumbs = h("ul", { class: "thumbs", "aria-label": `Pictures waiting for ${name}` }), rest = h("div"), waiting = h("div", {}, thumbs, rest);
  const root = h("li", { class: "card class-card" },
    h("div", { class: "class-head" }, h("span", { class: "dot", "aria-hidden": "true" }), h("div", { class: "class-words" }, h("div", { class: "class-title" }, title, pill), line, told),
      h("div", { class: "class-actions" }, film, add, menu)), kept, box, waiting, input);
  menu.addEventListener("keydown", (event) => { if (event.key === "Escape" && menu.open) { menu.open = false; menu.querySelector("summary").focus(); } });
  menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
  input.addEventListener("change", () => { take(chosenFiles(input)); input.value = ""; });
  takesDrops(root, take);

  function take(found) {
    const pictures = picturesOf(found);
    if (pictures.length) send(name, pictures.map(({ file }) => file));
  }

  async function toggleCamera() {
    const open = box.querySelector("video");
    if (open && isOpen(open)) return closeCamera();
    const video = h("video", { playsinline: true, "aria-label": "Picture of the camera" });
    video.muted = true;
    const shoot = h("button", { class: "button shoot wide", type: "button" }, "Hold to shoot");
    const stop = whileHeld(shoot, async () => { const file = await frame(video); if (file) send(name, [file]); });
    box.replaceChildren(video, shoot);
    box.hidden = false;
    film.setAttribute("aria-pressed", "true");
    const closed = () => { stop(); box.hidden = true; box.replaceChildren(); film.setAttribute("aria-pressed", "false"); };
    if (await attempt(() => openCamera(video, closed))) shoot.focus();
    else closed();
  }

  function update(each) {
    const good = each.pictures.filter((picture) => !picture.broken), broken = each.pictures.filter((picture) => picture.broken), known = each.known;
    root.style.setProperty("--own", colour(slotOf(name)));
    root.classList.toggle("busy", each.pictures.length > 0 || each.uploading > 0);
    const accuracy = known?.accuracy ?? null;
    show(line, known ? plural(known.pictures, "picture") : "new class", known?.newest ? h("span", { class: "long" }, ` · ${day(known.newest)}`) : null,
      accuracy === null ? null : [h("span", { class: "together" }, `${Math.round(accuracy * known.held_out)} of ${known.held_out}`, h("span", { class: "long" }, " classified correctly"))]);
    told.hidden = accuracy === null;
    told.firstChild.style.width = `${100 * (accuracy ?? 0)}%`;
    show(kept, Array.from({ length: known?.small_pictures ?? 0 }, (_, index) => h("img", { src: keptPicture(name, index), alt: "", loading: "lazy" })));
    kept.hidden = !known?.small_pictures;
    updateMenu(known, each.pictures.length);
    const more = all ? 0 : Math.max(0, good.length - SHOWN);
    const words = [each.learning ? `learning ${each.learning}` : null, good.length ? `${good.length} waiting` : null, each.uploading ? `${each.uploading} coming` : null].filter(Boolean).join(", ");
    pill.hidden = !good.length && !each.uploading && !each.learning;
    setText(pill, words);
    thumbs.hidden = !good.length;
    sync(thumbs, good.slice(0, good.length - more), (picture) => picture.id, thumb);
    show(rest,
      more ? h("button", { class: "link-button", type: "button", "data-more": true }, `Show ${more} more`) : null,
      broken.length ? h("ul", { class: "broken", "aria-label": "Pictures that cannot be read" }, broken.slice(0, 20).map((picture) => h("li", {},
        h("span", {}, h("strong", {}, picture.title || "A picture"), `: ${picture.broken}`),
        h("button", { class: "link-button", type: "button", "data-out": picture.id, "aria-label": `Dismiss ${picture.title}` }, "Dismiss")))) : null,
      !known && !each.pictures.length && !each.uploading && !each.learning ? h("p", { class: "empty small" }, "Drop pictures here, choose them with +, or use the camera.") : null);
  }

  waiting.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.hasAttribute("data-more")) { all = true; changed(); return; }
    const place = [...waiting.querySelectorAll("[data-out]")].indexOf(button);
    await attempt(async () => { await call("DELETE", "/api/waiting", null, { id: button.dataset.out }); await loadWaiting(); });
    const left = waiting.querySelectorAll("[data-out]");
    (left[Math.min(place, left.length - 1)] ?? add).focus();
  });

  function thumb(picture) {
    return h("li", {}, h("img", { src: `/api/waiting/thumbnail?id=${picture.id}`, alt: picture.title, loading: "lazy" }),
      h("button", { type: "button", "data-out": picture.id, "aria-label": `Take out ${picture.title}` }, icon("close")));
  }

  function updateMenu(known, pictures) {
    const item = (text, kind, action) => h("button", { type: "button", class: kind, onclick: () => { menu.open = false; menu.querySelector("summary").focus(); action(); } }, text);
    if (menu.dataset.kind === `${Boolean(known)}${pictures > 0}`) return;
    menu.dataset.kind = `${Boolean(known)}${pictures > 0}`;
    menu.replaceChildren(h("summary", { class: "icon-button", "aria-label": `More for ${name}`, title: "More" }, icon("more")),
      h("div", { class: "menu-list" },
        known ? item("Rename …", "", () => rename(name)) : null,
        pictures ? item("Take all pictures out", "", () => attempt(async () => { await call("DELETE", "/api/waiting", null, { name }); await loadWaiting(); })) : null,
        known ? item("Forget this class …", "bad", () => forget(name)) : item("Remove", "", () => remove(name))));
  }

  return { root, add, update, close: () => { const video = box.querySelector("video"); if (video && isOpen(video)) closeCamera(); root.remove(); } };
}

async function rename(name) {
  const fresh = await ask({ title: `Rename ${name}`, label: "New name", value: name, yes: "Rename" });
  if (fresh && await attempt(() => call("PATCH", "/api/classes", { name: fresh }, { name }))) tell(`${name} is called ${fresh} now`);
}

async function forget(name) {
  const sure = await ask({
    title: `Forget ${name}?`, text: "The model loses this class and all that was learnt of it. “Undo the last change” brings it back, until the next change.", yes: "Forget", danger: true,
  });
  if (sure && await attempt(() => call("DELETE", "/api/classes", null, { name }))) tell(`${name} is forgotten`);
}

async function remove(name) {
  store.added = store.added.filter((each) => !same(each, name));
  await attempt(async () => { await call("DELETE", "/api/waiting", null, { name }); await loadWaiting(); });
}
