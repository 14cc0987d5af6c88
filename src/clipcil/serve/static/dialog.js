// Questions, in the browser's own modal dialog: it keeps the focus inside and gives it back.

import { byId } from "./dom.js";

/** Ask; resolves to the text given (or true) or to null. `twice`: a second question that must be answered as well. */
export function ask({ title, text = "", yes, danger = false, label = null, value = "", twice = null }) {
  const dialog = byId("dialog"), input = byId("dialog-input"), confirm = byId("dialog-yes");
  const put = (heading, words, button) => {
    byId("dialog-title").textContent = heading;
    byId("dialog-text").textContent = words;
    byId("dialog-text").hidden = !words;
    confirm.textContent = button;
  };
  put(title, text, yes);
  confirm.className = danger ? "button danger" : "button primary";
  byId("dialog-field").hidden = label === null;
  byId("dialog-label").textContent = label ?? "";
  input.value = value;
  return new Promise((done) => {
    let again = twice;
    const finish = (result) => { dialog.removeEventListener("close", cancelled); byId("dialog-form").onsubmit = null; dialog.close(); done(result); };
    const cancelled = () => finish(null);
    byId("dialog-form").onsubmit = (event) => {
      event.preventDefault();
      if (label !== null && !input.value.trim()) return input.focus();
      if (again) {
        put(again.title, again.text, again.yes);
        again = null;
        byId("dialog-no").focus();
        return;
      }
      finish(label === null ? true : input.value.trim());
    };
    byId("dialog-no").onclick = cancelled;
    dialog.addEventListener("close", cancelled);
    dialog.showModal();
    (label !== null ? input : byId("dialog-no")).focus();
    if (label !== null) input.select();
  });
}
