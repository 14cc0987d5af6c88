// Starts the page.

import { startClasses } from "./classes.js";
import { attempt, byId, h, show } from "./dom.js";
import { startExamples } from "./examples.js";
import { listen, loadModel, loadWaiting, store, watch } from "./store.js";
import { startTeach } from "./teach.js";
import { startTools } from "./tools.js";
import { startTry } from "./try.js";

startClasses();
startTeach();
startTry();
startTools();
startExamples();
watch(() => {
  const box = byId("lost"), folder = store.model?.folder;
  box.hidden = store.lost === null;
  if (!box.hidden) show(box, store.lost || ["clipcil does not answer. ", folder ? ["Start it again: ", h("code", {}, `clipcil serve ${/^[\w./~+-]+$/.test(folder) ? folder : `"${folder}"`}`), ". "] : null, "This page then goes on by itself."]);
});
for (const id of ["teach", "try"]) { // a column that is taller than the window scrolls until its end is seen, and stays there
  new ResizeObserver(() => byId(id).style.setProperty("--tall", `${byId(id).offsetHeight}px`)).observe(byId(id));
}
await attempt(async () => { await loadModel(); await loadWaiting(); });
listen();
document.documentElement.dataset.ready = "";
