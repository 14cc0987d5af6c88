// Questions, in the browser's own modal dialog: it keeps the focus inside and gives it back.

import { byId } from "./dom.js";

/** Ask; resolves to the text given (or true) or to null. */
export function ask({ title, text = "", yes, danger = false, label = null, value = "" }) {
  const dialog = byId("dialog"), input = byId("dialog-input"), confirm = byId("dialog-yes");
  byId("dialog-title").textContent = title;
  byId("dialog-text").textContent = text;
  byId("dialog-text").hidden = !text;
  confirm.textContent = yes;
  confirm.className = danger ? "button danger" : "button primary";
  byId("dialog-field").hidden = label === null;
  byId("dialog-label").textContent = label ?? "";
  input.value = value;
  return new Promise((done) => {
    const finish = (result) => { dialog.removeEventListener("close", cancelled); byId("dialog-form").onsubmit = null; dialog.close(); done(result); };
    const cancelled = () => finish(null);
    byId("dialog-form").onsubmit = (event) => {
      event.preventDefault();
      if (label !== null && !input.value.trim()) return input.focus();
      finish(label === null ? true : input.value.trim());
    };
    byId("dialog-no").onclick = cancelled;
    dialog.addEventListener("close", cancelled);
    dialog.showModal();
    (label !== null ? input : byId("dialog-no")).focus();
    if (label !== null) input.select();
  });
}
