// The third column: predictions.

import { call, callPatiently } from "./api.js";
import { closeCamera, frame, isOpen, openCamera } from "./camera.js";
import { attempt, byId, colour, h, percent, show, tell } from "./dom.js";
import { takesDrops } from "./files.js";
import { allClasses, changed, cleaned, loadWaiting, same, slotOf, store, watch } from "./store.js";

let picture = null; // what is shown and was asked about
let answeredBy = null; // the model that answered, to ask again when there is a new one

export function startTry() {
  const input = byId("try-file");
  byId("try-choose").addEventListener("click", () => input.click());
  input.addEventListener("change", () => { if (input.files.length) tryPicture(input.files[0]); input.value = ""; });
  takesDrops(byId("try-stage"), (found) => { if (found.length) tryPicture(found[0].file); });
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
    if (file) { event.preventDefault(); tryPicture(file); byId("try").scrollIntoView({ block: "nearest" }); }
  });
  byId("try-camera").addEventListener("click", toggleCamera);
  byId("why").addEventListener("click", (event) => { if (event.target.closest("button")) explain(event.target.closest("button")); });
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault()); // a stray drop must not leave the page
  watch(() => {
    const now = store.model?.revision;
    if (picture && answeredBy !== null && now !== answeredBy && store.model.exists) askAgain();
    else if (!store.model?.exists) show(byId("answer"), h("p", { class: "quiet small" }, "The model knows nothing yet: teach it two classes first."));
    else if (!picture) show(byId("answer"));
    if (!store.model?.exists) { byId("correct").hidden = true; byId("why").hidden = true; }
  });
}

export async function tryPicture(file) {
  closeCamera();
  const image = byId("try-picture");
  if (image.src) URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.hidden = false;
  byId("try-stage").classList.add("filled");
  byId("try-hint").hidden = true;
  picture = file;
  show(byId("answer")); // what was said of the picture before it is not said of this one
  byId("correct").hidden = true;
  byId("why").hidden = true;
  await askAgain();
}

const askAgain = () => attempt(async () => {
  const asked = picture;
  answeredBy = store.model?.revision ?? null;
  const { predictions } = await callPatiently("POST", "/api/predict", asked, { top: 5 });
  if (asked !== picture) return; // another picture was dropped meanwhile
  render(predictions[0]);
  byId("answer").dataset.picture = byId("try-picture").src;
});

async function toggleCamera() {
  const video = byId("try-video"), button = byId("try-camera");
  if (isOpen(video)) return closeCamera();
  const closed = () => { video.hidden = true; byId("try-hint").hidden = picture !== null && !byId("try-picture").hidden; button.setAttribute("aria-pressed", "false"); };
  byId("try-picture").hidden = true;
  byId("try-hint").hidden = true;
  video.hidden = false;
  button.setAttribute("aria-pressed", "true");
  if (!await attempt(() => openCamera(video, closed))) return closed();
  while (isOpen(video)) {
    const file = await frame(video);
    if (!file || !isOpen(video)) break;
    try {
      const { predictions } = await call("POST", "/api/predict", file, { top: 5 });
      picture = file;
      answeredBy = store.model?.revision ?? null;
      if (isOpen(video)) render(predictions[0]);
    } catch (error) {
      if (error.status !== 503) { tell(error.message, true); return closeCamera(); }
    }
    await new Promise((done) => setTimeout(done, 200));
  }
}

function render(prediction) {
  resetWhy(prediction);
  if (prediction.error) {
    byId("correct").hidden = true;
    return show(byId("answer"), h("p", { class: "note bad" }, prediction.error));
  }
  const best = prediction.classes[0];
  show(byId("answer"),
    h("p", { class: "verdict" }, prediction.unknown ? "None of these" : best.name),
    prediction.unknown ? h("p", { class: "note" }, `It resembles none of the classes; the nearest is ${best.name}.`) : null,
    h("ul", { class: "bars", "aria-label": "Likeliest classes" }, prediction.classes.map((each) => h("li", { own: colour(slotOf(each.name)) },
      h("span", { class: "name" }, each.name), h("span", { class: "track", "aria-hidden": "true" }, h("span", { "width%": 100 * each.probability })),
      h("span", { class: "number" }, percent(each.probability))))));
  renderCorrect(prediction);
}

function renderCorrect(prediction) {
  const box = byId("correct"), shown = prediction.classes.map((each) => each.name).slice(prediction.unknown ? 0 : 1);
  const others = allClasses().map((each) => each.name).filter((name) => !shown.some((each) => same(each, name)) && (prediction.unknown || !same(name, prediction.name)));
  const chips = [...shown, ...others].slice(0, 6);
  if (box.contains(document.activeElement)) return; // do not take a choice away under somebody's finger
  box.hidden = false;
  const input = h("input", { id: "correct-name", list: "correct-names", placeholder: "another class …", autocomplete: "off", maxlength: 300 });
  show(box, h("h3", {}, prediction.unknown ? "What does it show?" : "Wrong? It shows …"),
    h("div", { class: "chips" }, chips.map((name) => h("button", { class: "chip", type: "button", "data-name": name, own: colour(slotOf(name)) }, h("span", { class: "dot", "aria-hidden": "true" }), name))),
    h("form", { class: "row" }, h("label", { class: "hidden-label", for: "correct-name" }, "Another class"), input,
      h("datalist", { id: "correct-names" }, others.slice(0, 200).map((name) => h("option", { value: name }))), h("button", { class: "button", type: "submit" }, "Add")));
  box.onclick = (event) => { const name = event.target.closest("[data-name]")?.dataset.name; if (name) put(name); };
  box.onsubmit = (event) => { event.preventDefault(); const field = byId("correct-name"), name = field.value.trim(); if (name) { field.value = ""; put(name); } };
}

/** Put the picture right with one press: it is taught at once, unless other pictures wait or the class is new. */
async function put(name) {
  const file = picture instanceof File ? picture : new File([picture], "pasted.png", { type: picture.type });
  const form = new FormData();
  form.append("name", cleaned(name));
  form.append("pictures", file, file.name || "picture");
  byId("answer").focus({ preventScroll: true }); // the choice goes
  await attempt(async () => {
    const known = store.model.classes.some((each) => same(each.name, name));
    const alone = !store.waiting.length && !store.uploading.size && store.lesson?.state !== "running";
    const { pictures: [added] } = await callPatiently("POST", "/api/waiting", form);
    if (added.broken) throw new Error(added.broken);
    const teaching = known && alone;
    if (teaching) store.lesson = await call("POST", "/api/lesson");
    else await loadWaiting();
    show(byId("correct"), h("p", { class: "note good" }, teaching ? `Teaching it as ${name} …` : `It waits as ${name}. Press Teach when all pictures are there.`));
    changed();
  });
}

function resetWhy(prediction) {
  const box = byId("why");
  box.hidden = Boolean(prediction.error) || isOpen(byId("try-video"));
  if (box.querySelector("img")) URL.revokeObjectURL(box.querySelector("img").src);
  box.replaceChildren(h("button", { class: "link-button", type: "button" }, "Why this answer?"));
}

async function explain(button) {
  const asked = picture, box = byId("why");
  button.disabled = true;
  button.textContent = "Looking …";
  const done = await attempt(async () => {
    const found = await callPatiently("POST", "/api/explain", asked);
    if (asked !== picture) return;
    const bytes = Uint8Array.from(atob(found.heatmap.split(",")[1]), (letter) => letter.charCodeAt(0)); // the page may show a blob, but no data: address
    const figure = (src, alt, text) => h("figure", {}, h("img", { src, alt }), h("figcaption", { class: "small quiet" }, text));
    box.replaceChildren(h("h3", {}, `Why ${found.name}?`), h("div", { class: "row" },
      figure(URL.createObjectURL(new Blob([bytes], { type: "image/png" })), "The picture with a heat map", `The redder a place, the more it speaks for ${found.name}.`),
      found.similar ? figure(found.similar, `A kept picture of ${found.name}`, `The most similar of the small pictures kept of ${found.name}.`)
        : h("p", { class: "small quiet" }, "To see the most similar picture that was taught, switch on “Keep small pictures” before a lesson.")));
  });
  if (!done) { button.disabled = false; button.textContent = "Why this answer?"; }
}
