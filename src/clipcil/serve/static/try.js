// The third column: predictions.

import { call, callPatiently } from "./api.js";
import { closeCamera, frame, isOpen, openCamera } from "./camera.js";
import { attempt, byId, colour, h, percent, show, tell } from "./dom.js";
import { droppedFiles, send, takesDrops } from "./files.js";
import { allClasses, cleaned, colourIndex, same, store, watch } from "./store.js";

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
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault()); // a stray drop must not leave the page
  watch(() => {
    const now = store.model?.revision;
    if (picture && answeredBy !== null && now !== answeredBy && store.model.exists) askAgain();
    else if (!store.model?.exists) show(byId("answer"), h("p", { class: "quiet small" }, "The model knows nothing yet: teach it two classes first."));
    else if (!picture) show(byId("answer"));
  });
}

async function tryPicture(file) {
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
  if (prediction.error) {
    byId("correct").hidden = true;
    return show(byId("answer"), h("p", { class: "note bad" }, prediction.error));
  }
  const best = prediction.classes[0];
  show(byId("answer"),
    h("p", { class: "verdict" }, prediction.unknown ? "None of these" : best.name),
    prediction.unknown ? h("p", { class: "note" }, `It resembles none of the classes; the nearest is ${best.name}.`) : null,
    h("ul", { class: "bars", "aria-label": "Likeliest classes" }, prediction.classes.map((each) => h("li", { own: colour(colourIndex(each.name)) },
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
  show(box, h("h3", {}, prediction.unknown ? "Which is it? Put it with …" : "Wrong? Put it with …"),
    h("div", { class: "chips" }, chips.map((name) => h("button", { class: "chip", type: "button", "data-name": name, own: colour(colourIndex(name)) }, h("span", { class: "dot", "aria-hidden": "true" }), name))),
    h("form", { class: "row" }, h("label", { class: "hidden-label", for: "correct-name" }, "Another class"), input,
      h("datalist", { id: "correct-names" }, others.slice(0, 200).map((name) => h("option", { value: name }))), h("button", { class: "button", type: "submit" }, "Put")));
  box.onclick = (event) => { const name = event.target.closest("[data-name]")?.dataset.name; if (name) put(name); };
  box.onsubmit = (event) => { event.preventDefault(); const field = byId("correct-name"), name = field.value.trim(); if (name) { field.value = ""; put(name); } };
}

function put(name) {
  const file = picture instanceof File ? picture : new File([picture], "pasted.png", { type: picture.type });
  send(cleaned(name), [file]);
  tell(`Put with ${name}; it will be learnt in the next lesson`);
}
