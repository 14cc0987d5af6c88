// The second column: the current lesson, its result, and the lessons so far.

import { call } from "./api.js";
import { ask } from "./dialog.js";
import { attempt, byId, colour, day, h, percent, plural, s, setText, show, tell } from "./dom.js";
import { keptCount, keptPicture, slotOf, store, watch } from "./store.js";

const STAGES = {
  starting: "Getting ready", "comparing with pictures taught before": "Comparing with pictures taught before", preprocess: "Reading the pictures",
  encode: "Looking at the pictures", measuring: "Measuring on held-out pictures", saving: "Saving the model",
};
let shownOutcome = null;
let seen = false; // whether a lesson ran while this page was open: the result of an older one is shown, but not announced

export function startTeach() {
  byId("teach-button").addEventListener("click", () => attempt(async () => { store.lesson = await call("POST", "/api/lesson"); render(); byId("cancel-button").focus(); }));
  byId("cancel-button").addEventListener("click", () => attempt(() => call("DELETE", "/api/lesson")));
  byId("undo-button").addEventListener("click", undo);
  watch(render);
}

/** What undoing would do: take back a lesson or another change, or bring back what was undone. */
function undoWords() {
  const more = store.model.lessons.length - store.model.previous.lessons;
  return more > 0 ? "Undo the last lesson" : more < 0 ? "Bring back the lesson that was undone" : "Undo the last change";
}

async function undo() {
  const { lessons, classes } = store.model.previous;
  const sure = await ask({ title: `${undoWords()}?`, text: `The model goes back to the one with ${plural(lessons, "lesson")} and ${plural(classes, "class", "classes")}. This one is kept until the next lesson.`, yes: "Go back" });
  if (sure && await attempt(() => call("POST", "/api/undo"))) tell("The earlier model is back");
}

function render() {
  const good = store.waiting.map((each) => each.pictures.filter((picture) => !picture.broken).length).filter((count) => count > 0);
  const pictures = good.reduce((sum, count) => sum + count, 0), lesson = store.lesson, running = lesson?.state === "running";
  setText(byId("teach-summary"), running ? `Teaching ${plural(Object.values(lesson.classes).reduce((sum, count) => sum + count, 0), "picture")} …`
    : pictures ? `${plural(pictures, "picture")} of ${plural(good.length, "class", "classes")} ${pictures === 1 ? "waits" : "wait"} to be taught.`
    : "Pictures that are added to a class wait here to be taught.");
  const button = byId("teach-button"), told = outcomeMark(lesson) !== null && !pictures; // a result speaks for itself
  byId("teach-summary").hidden = told;
  button.hidden = running || told;
  button.disabled = !pictures || store.lost !== null || [...store.uploading.values()].some(Boolean);
  byId("tab-waiting").hidden = !pictures;
  setText(byId("tab-waiting"), String(pictures));
  byId("progress").hidden = !running;
  if (running) { seen = true; renderProgress(lesson); }
  renderOutcome(lesson);
  renderHistory();
}

function renderProgress(lesson) {
  setText(byId("stage"), STAGES[lesson.stage] ?? `Learning: ${lesson.stage}`);
  const bar = byId("bar");
  if (lesson.total) bar.value = lesson.done / lesson.total;
  else bar.removeAttribute("value");
  const left = lesson.seconds_left;
  setText(byId("time-left"), left === null || left === undefined ? "" : left < 1 ? "almost done" : left < 90 ? `about ${Math.ceil(left)} s left` : `about ${Math.ceil(left / 60)} min left`);
}

/** What the outcome is of; null for none, also once the model was changed in another way: its accuracy is another now. */
function outcomeMark(lesson) {
  if (!lesson || lesson.state === "running" || (lesson.state === "done" && store.model?.lesson !== lesson.id)) return null;
  return `${lesson.id} ${lesson.state} ${store.model?.keep_small_pictures}`;
}

function renderOutcome(lesson) {
  const outcome = byId("outcome"), mark = outcomeMark(lesson);
  if (mark === shownOutcome) return;
  const fresh = seen, had = [byId("cancel-button"), document.body].includes(document.activeElement);
  shownOutcome = mark;
  seen &&= mark === null;
  outcome.hidden = mark === null;
  if (!mark) return;
  if (lesson.state === "done") outcome.replaceChildren(...learnt(lesson.result));
  else if (lesson.state === "cancelled") outcome.replaceChildren(h("p", { class: "note" }, "The lesson was cancelled. The model is as it was, and the pictures wait again."));
  else outcome.replaceChildren(h("p", { class: "note bad", role: "alert" }, `The lesson failed: ${lesson.error}. The model is as it was.`));
  if (fresh && had) outcome.focus({ preventScroll: true });
  if (fresh && lesson.state === "failed") tell(`The lesson failed: ${lesson.error}`, true);
  if (fresh && lesson.state === "done") tell(lesson.result.accuracy === null ? "Learnt." : `Learnt. ${percent(lesson.result.accuracy)} of held-out pictures are classified correctly.`);
}

function learnt(result) {
  const names = [...Object.entries(result.new).map(([name, count]) => [name, count, "new"]), ...Object.entries(result.again).map(([name, count]) => [name, count, "more"])];
  return [
    h("div", { class: "score" }, result.accuracy === null ? null : ring(result.accuracy),
      h("div", {}, h("h3", {}, "Learnt"), h("p", { class: "small quiet" }, result.accuracy === null
        ? result.held_out ? "With one class every answer is right. Teach another class to measure the accuracy." : "Too few pictures to measure the accuracy: five or more of each class are enough."
        : `${Math.round(result.accuracy * result.held_out)} of ${plural(result.held_out, "picture")} ${result.left_one_out ? "(each left out once)" : "held out of training"} are classified correctly, over all classes, old ones included${result.accuracy_if_forced > result.accuracy ? `; ${percent(result.accuracy_if_forced)} if none may be called “none of these”` : ""}. Expect ${percent(result.interval[0])} to ${percent(result.interval[1])} on pictures like these.`))),
    h("ul", { class: "chips", "aria-label": "What was learnt" }, names.slice(0, 8).map(([name, count, kind]) => h("li", { class: "chip", own: colour(slotOf(name)) },
      h("span", { class: "dot", "aria-hidden": "true" }), `${name} · ${kind === "new" ? plural(count, "picture") : `${count} more`}`)), names.length > 8 ? h("li", { class: "chip" }, `and ${names.length - 8} more`) : null),
    result.confused.length ? h("div", {}, h("h3", {}, "Confused"), h("ul", { class: "confused" }, result.confused.slice(0, 6).map((pair) =>
      h("li", {}, looks(pair.true), h("span", {}, h("strong", {}, pair.true), h("span", { class: "quiet" }, " mistaken for "), h("strong", {}, pair.guess), h("span", { class: "quiet" }, ` ${pair.pictures}×`)), looks(pair.guess))))) : null,
    result.warnings.slice(0, 10).map((text) => h("p", { class: "note" }, `${text[0].toUpperCase()}${text.slice(1)}.`)),
    result.warnings.length > 10 ? h("p", { class: "note" }, `And ${result.warnings.length - 10} more notes of this kind.`) : null,
    result.repeated ? h("p", { class: "note" }, `${plural(result.repeated, "picture")} left out: taught before.`) : null,
    result.unreadable.length ? h("p", { class: "note" }, `Left out: ${result.unreadable.slice(0, 5).join("; ")}`) : null,
  ].flat().filter(Boolean);
}

/** Small pictures of a class, where some are kept. */
function looks(name) {
  const count = Math.min(2, keptCount(name));
  return count ? h("span", { class: "looks", "aria-hidden": "true" }, Array.from({ length: count }, (_, index) => h("img", { src: keptPicture(name, index), alt: "" }))) : null;
}

function ring(share) {
  const round = 2 * Math.PI * 40;
  const circle = (kind, dash) => s("circle", { class: kind, cx: 50, cy: 50, r: 40, fill: "none", "stroke-width": 10, "stroke-linecap": "round", "stroke-dasharray": dash, transform: "rotate(-90 50 50)" });
  return s("svg", { class: "ring", viewBox: "0 0 100 100", role: "img", "aria-label": percent(share) }, circle("track", `${round}`), circle("value", `${Math.max(0.001, share) * round} ${round}`),
    s("text", { x: 50, y: 59, "text-anchor": "middle" }, `${Math.round(100 * share)}`, s("tspan", { class: "sign" }, "%")));
}

function renderHistory() {
  const lessons = store.model?.lessons ?? [];
  byId("undo-button").hidden = !store.model?.previous;
  if (store.model?.previous) setText(byId("undo-button"), undoWords());
  byId("undo-button").disabled = store.lesson?.state === "running";
  if (!lessons.length) return show(byId("history"), h("p", { class: "quiet" }, "No lesson yet. Each lesson is listed here with its accuracy."));
  const list = lessons.map((lesson, index) => ({ ...lesson, number: index + 1 })).reverse();
  return show(byId("history"), curve(lessons), h("ol", { class: "lessons", tabindex: "0", "aria-label": "Lessons, the newest first" }, list.map((lesson) => h("li", {},
    h("span", { class: "quiet" }, `${lesson.number}`),
    h("span", { class: "what" }, taught(lesson), h("br"), h("span", { class: "quiet small" }, `${day(lesson.when)} · ${plural(lesson.classes, "class", "classes")} after it`)),
    h("strong", {}, lesson.accuracy === null ? "–" : percent(lesson.accuracy))))));
}

function taught(lesson) {
  const parts = [lesson.new ? plural(lesson.new, "new class", "new classes") : null, lesson.again ? `more of ${plural(lesson.again, "class", "classes")}` : null];
  return `${parts.filter(Boolean).join(", ")} from ${plural(lesson.pictures, "picture")}`;
}

function curve(lessons) {
  const points = lessons.map((lesson, index) => [index, lesson.accuracy]).filter(([, accuracy]) => accuracy !== null);
  if (points.length < 2) return null;
  const last = lessons.length - 1, x = (index) => 46 + (index / last) * 282, y = (share) => 110 - share * 96;
  const line = points.map(([index, share]) => `${x(index)},${y(share)}`).join(" ");
  const words = `Accuracy on held-out pictures over ${lessons.length} lessons: ${points.map(([, share]) => percent(share)).join(", ")}`;
  return s("svg", { class: "curve", viewBox: "0 0 340 132", role: "img", "aria-label": words },
    [0, 0.5, 1].map((share) => [s("line", { class: "grid", x1: 46, x2: 328, y1: y(share), y2: y(share) }), s("text", { x: 39, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}\u00a0%`)]).flat(),
    s("polygon", { class: "area", points: `${x(points[0][0])},110 ${line} ${x(points[points.length - 1][0])},110` }), s("polyline", { class: "line", points: line }),
    points.map(([index, share]) => s("circle", { cx: x(index), cy: y(share), r: 4 })),
    [0, last].map((index) => s("text", { x: x(index), y: 128, "text-anchor": index ? "end" : "start" }, `lesson ${index + 1}`)));
}
