// The model as a whole: what it is, download, upload, export, and whether small pictures are kept.

import { call, download } from "./api.js";
import { ask } from "./dialog.js";
import { attempt, byId, h, percent, plural, setText, show, tell } from "./dom.js";
import { store, watch } from "./store.js";

export function startTools() {
  byId("download").addEventListener("click", (event) => busy(event.target, () => download("/api/model/download")));
  byId("export").addEventListener("click", (event) => busy(event.target, () => download("/api/export", { format: "pt2" })));
  byId("upload").addEventListener("click", () => byId("upload-file").click());
  byId("upload-file").addEventListener("change", upload);
  byId("keep-small").addEventListener("change", keepSmall);
  watch(render);
}

async function busy(button, action) {
  const text = button.textContent;
  button.disabled = true;
  button.textContent = "Getting it ready …";
  await attempt(action);
  button.textContent = text;
  button.disabled = false;
  button.focus();
}

async function upload() {
  const input = byId("upload-file"), file = input.files[0];
  input.value = "";
  if (!file) return;
  const sure = !store.model.exists || await ask({ title: "Replace this model?", text: `${file.name} takes the place of the model with ${plural(store.model.classes.length, "class", "classes")}.`, yes: "Replace it", danger: true });
  if (sure && await attempt(() => call("POST", "/api/model/upload", file))) tell("The uploaded model is in place");
}

async function keepSmall() {
  const box = byId("keep-small"), wanted = box.checked;
  if (!await attempt(() => call("PATCH", "/api/settings", { keep_small_pictures: wanted }))) box.checked = !wanted;
  else tell(wanted ? "From the next lesson on, a few small pictures of each class are kept" : "The small pictures are deleted; none will be kept");
}

function render() {
  const model = store.model;
  if (!model) return;
  setText(byId("model-line"), model.exists ? `${model.name} · ${plural(model.classes.length, "class", "classes")}` : `${model.name} · a new model`);
  document.title = `${model.name} – clipcil`;
  for (const id of ["download", "export"]) byId(id).disabled = !model.exists || byId(id).textContent.startsWith("Getting");
  byId("keep-small").checked = model.keep_small_pictures;
  const pictures = model.classes.reduce((sum, each) => sum + each.pictures, 0);
  const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  show(byId("model-facts"),
    row("Folder", model.folder),
    model.exists ? [row("Knows", `${plural(model.classes.length, "class", "classes")} from ${plural(pictures, "picture")}`),
      row("Accuracy", model.accuracy === null ? "not measured yet" : `${percent(model.accuracy)} of ${plural(model.held_out, "held-out picture")}`),
      row("Method", `${model.method} on ${model.backbone}`)] : null);
}
