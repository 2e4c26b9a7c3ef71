// Shortcuts of the keyboard. None of them changes anything.
"use strict";

(() => {
  const NEXT_KEY_MS = 1500;
  const panel = document.getElementById("shortcuts");
  const hint = document.querySelector("[data-shortcuts-hint]");
  let went = 0;

  const toggle = () => (panel.open ? panel.close() : panel.showModal());
  const find = () => document.querySelector("main input[type=search]") || document.getElementById("find-id");
  const updates = () => document.querySelector("#updates:not([hidden]) [data-updates-button]");

  hint.hidden = false;
  hint.querySelector("[data-shortcuts-button]").addEventListener("click", toggle);

  document.addEventListener("keydown", (event) => {
    // Keys of the browser, and those that a user types, are not ours.
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.target.matches("input, select, textarea")) return;
    const goes = Date.now() - went < NEXT_KEY_MS && panel.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
    went = 0;
    if (goes) {
      goes.click();
    } else if (event.key === "?") {
      toggle();
    } else if (panel.open) {
      return;
    } else if (event.key === "g") {
      went = Date.now();
    } else if (event.key === "/" && find()) {
      find().focus();
    } else if (event.key === "s" && updates()) {
      updates().click();
    } else {
      return;
    }
    event.preventDefault();
  });
})();
