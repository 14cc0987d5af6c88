// Embedded pictures for somebody who has none at hand: two lessons to teach, and others to try.

import { attempt, byId, h, plural, show } from "./dom.js";
import { send } from "./files.js";
import { allClasses, same, store, watch } from "./store.js";
import { tryPicture } from "./try.js";

const LESSONS = [["apple", "banana", "pizza"], ["dolphin", "fox"]];
const STRANGER = "bus"; // never taught
const TAUGHT = 6; // pictures 0 to 5 of a class are for teaching, 6 and 7 for trying
const address = (name, index) => `/api/examples/picture?${new URLSearchParams({ name, index })}`;

async function picture(name, index) {
  const answer = await fetch(address(name, index));
  if (!answer.ok) throw new Error((await answer.json()).error);
  return new File([await answer.blob()], `${name} ${index + 1}.png`, { type: "image/png" });
}

export function startExamples() {
  byId("examples").addEventListener("click", (event) => { if (event.target.closest("button")) add(Number(event.target.closest("button").dataset.lesson)); });
  byId("samples").addEventListener("click", (event) => {
    const name = event.target.closest("button")?.dataset.name;
    if (name) attempt(async () => tryPicture(await picture(name, TAUGHT)));
  });
  watch(render);
}

function add(lesson) {
  byId("new-name").focus({ preventScroll: true }); // the button goes
  return attempt(async () => {
    for (const name of LESSONS[lesson]) send(name, await Promise.all(Array.from({ length: TAUGHT }, (_, index) => picture(name, index))));
  });
}

const image = (name, index) => h("img", { src: address(name, index), alt: "" });

function render() {
  if (!store.model) return;
  const classes = allClasses(), has = (name) => classes.some((each) => same(each.name, name)), knows = (name) => store.model.classes.some((each) => same(each.name, name));
  const empty = !classes.length, second = LESSONS[0].every(knows) && !LESSONS[1].some(has);
  byId("examples").hidden = !empty && !second;
  if (empty || second) {
    const names = LESSONS[empty ? 0 : 1];
    show(byId("examples"),
      h("h3", {}, empty ? "No pictures at hand?" : "Now teach it more"),
      h("div", { class: "strip", "aria-hidden": "true" }, names.flatMap((name) => [0, 1].map((index) => image(name, index)))),
      h("p", { class: "quiet small" }, empty ? `Start with drawings that come with clipcil: ${names.join(", ")}. They can be forgotten later.`
        : `Add ${names.join(" and ")}: the pictures of ${LESSONS[0].join(", ")} are not needed again.`),
      h("button", { class: "button", type: "button", "data-lesson": empty ? "0" : "1" }, `Add ${plural(names.length * TAUGHT, "example picture")}`));
  }
  const samples = LESSONS[0].every(knows) ? [...LESSONS.flat(), STRANGER] : [];
  byId("samples").hidden = !samples.length;
  if (samples.length) show(byId("samples"), h("p", { class: "quiet small" }, "Try a drawing that it has not seen:"), h("div", { class: "strip" },
    samples.map((name) => h("button", { type: "button", "data-name": name, "aria-label": `Try a ${name}`, title: name }, image(name, TAUGHT)))));
}
