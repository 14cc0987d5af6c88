"use strict";
(() => {
  // A click on a heading sorts its table: numbers by size (largest first), words by the alphabet, and words (such as a
  // dash) below numbers either way.
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const words = cell.textContent.trim();
    const number = Number.parseFloat(words.replace("\u2212", "-"));
    return Number.isNaN(number) ? words : number;
  };
  const compare = (a, b, sign) => {
    const words = (typeof a === "string") - (typeof b === "string");
    return words || sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
      const before = head.getAttribute("aria-sort");
      const falls = before ? before === "ascending" : rows.some(([key]) => typeof key === "number");
      rows.sort(([a], [b]) => compare(a, b, falls ? -1 : 1));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      body.append(...rows.map(([, row]) => row));
    }));
  }
  // The point of a figure nearest to the pointer says what it is.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const figure of document.querySelectorAll("figure[data-points]")) {
    const points = JSON.parse(figure.dataset.points);
    const image = figure.querySelector("img");
    const hide = () => { tip.hidden = true; };
    const show = (event) => {
      const box = image.getBoundingClientRect();
      let nearest = null;
      let least = 24;
      for (const [x, y, words] of points) {
        const across = box.left + (x / 100) * box.width - event.clientX;
        const down = box.top + (y / 100) * box.height - event.clientY;
        const distance = Math.hypot(across, down);
        if (distance < least) [least, nearest] = [distance, words];
      }
      if (nearest === null) { hide(); return; }
      tip.textContent = nearest;
      tip.hidden = false;
      const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - tip.offsetWidth - 4);
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
    };
    image.addEventListener("pointermove", show);
    image.addEventListener("pointerdown", show);
    image.addEventListener("pointerleave", hide);
  }
  // The ticked mistakes as a list of corrections.
  const save = document.querySelector("#save");
  if (save) {
    save.hidden = false;
    save.addEventListener("click", () => {
      const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
      const lines = [...document.querySelectorAll(".fixes li")].flatMap((item) => {
        const tick = item.querySelector("[data-picture]");
        const name = item.querySelector("[list]").value.trim();
        return tick.checked && name ? [`${quoted(tick.dataset.picture)},${quoted(name)}`] : [];
      });
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([["picture,class", ...lines, ""].join("\n")], { type: "text/csv" }));
      link.download = "fixes.csv";
      link.click();
      URL.revokeObjectURL(link.href);
    });
  }
})();
