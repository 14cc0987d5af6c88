// Starts the page.

import { startClasses } from "./classes.js";
import { attempt } from "./dom.js";
import { listen, loadModel, loadWaiting } from "./store.js";
import { startTeach } from "./teach.js";
import { startTools } from "./tools.js";
import { startTry } from "./try.js";

startClasses();
startTeach();
startTry();
startTools();
await attempt(async () => { await loadModel(); await loadWaiting(); });
listen();
document.documentElement.dataset.ready = "";
