// Updates the parts of the page that are marked `data-live`. Every page works without this script.
"use strict";

(() => {
  const SHORTEST_MS = 2000;
  const LONGEST_MS = 30000;
  const live = [...document.querySelectorAll("[data-live][id]")];
  const bar = document.querySelector("[data-updates]");
  const text = document.querySelector("[data-updates-text]");
  const button = document.querySelector("[data-updates-button]");

  // A notice is for the first look only, and not for a reload or a bookmark.
  const here = new URL(location.href);
  if (here.searchParams.has("notice")) {
    here.searchParams.delete("notice");
    history.replaceState(null, "", here);
  }
  // After an error, the form that the user comes back to has what was typed. It stays in this tab.
  const kept = sessionStorage.getItem("typed");
  if (document.querySelector(".failure")) {
    if (kept) sessionStorage.setItem("failed", "1");
  } else {
    if (kept && sessionStorage.getItem("failed")) {
      const [action, fields] = JSON.parse(kept);
      for (const form of document.forms) {
        if (form.action !== action || form.method !== "post") continue;
        for (const [name, value] of fields) {
          const input = form.elements.namedItem(name);
          if (input && input.type !== "hidden" && "value" in input) input.value = value;
        }
      }
    }
    sessionStorage.removeItem("typed");
    sessionStorage.removeItem("failed");
  }
  document.addEventListener("submit", ({ target }) => {
    if (target.method !== "post") return;
    const fields = [...new FormData(target)].filter(([name]) => name !== "csrfmiddlewaretoken");
    sessionStorage.setItem("typed", JSON.stringify([target.action, fields]));
  });

  // A replay asks for one step after the other, until the user leaves the page or its answer has no form.
  async function replay(section) {
    for (;;) {
      const form = section.querySelector("form[data-wait-ms]");
      if (!form) return;
      const button = form.querySelector("[data-go-on]");
      button.hidden = true;
      try {
        await new Promise((done) => setTimeout(done, Number(form.dataset.waitMs)));
        const response = await fetch(location.pathname, { method: "POST", body: new URLSearchParams(new FormData(form)) });
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        const fresh = page.getElementById(section.id);
        if (!fresh) throw new Error((page.querySelector("main") || page.body).textContent.trim());
        section.replaceChildren(...document.adoptNode(fresh).childNodes);
      } catch (error) {
        section.querySelector("[role=status]").textContent += ` Interrupted: ${error.message}`;
        button.hidden = false;
        return;
      }
    }
  }
  const steps = document.getElementById("steps");
  if (steps) replay(steps);

  if (!live.length || !bar) return;

  let wait = SHORTEST_MS;
  let timer = 0;
  let request = null;
  let stopped = false;
  let updatedAt = new Date();

  const clock = (date) => date.toISOString().slice(11, 19);

  function report(sentence, isStale) {
    if (text.textContent !== sentence) text.textContent = sentence;
    bar.classList.toggle("stale", isStale);
  }

  function plan() {
    clearTimeout(timer);
    if (!stopped && !document.hidden) timer = setTimeout(update, wait);
  }

  function replace(old, fresh) {
    if (old.innerHTML === fresh.innerHTML) return false;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    // A user who is about to press a button or to type must not lose it.
    if (focused && focused.matches("input, button, select, textarea")) return true;
    const selection = getSelection();
    if (selection && !selection.isCollapsed && old.contains(selection.anchorNode)) return true;
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    old.replaceChildren(...document.adoptNode(fresh).childNodes);
    old.querySelectorAll("details").forEach((each, place) => { each.open = Boolean(open[place]); });
    if (focused && focused.hasAttribute("href")) {
      const same = [...old.querySelectorAll("a")].find(
        (each) => each.getAttribute("href") === focused.getAttribute("href"));
      if (same) same.focus({ preventScroll: true });
    }
    return true;
  }

  async function update() {
    request = new AbortController();
    const signal = request.signal;
    try {
      const response = await fetch(here, { cache: "no-store", signal });
      if (response.redirected || response.status === 401 || response.status === 403) {
        stop("Not updated: log in again.");
        return;
      }
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      if (!response.ok) {
        const title = page.querySelector("h1");
        throw new Error(title ? title.textContent : response.statusText);
      }
      let changed = false;
      for (const old of live) {
        const fresh = page.getElementById(old.id);
        if (fresh && replace(old, fresh)) changed = true;
      }
      wait = changed ? SHORTEST_MS : Math.min(wait * 1.2, SHORTEST_MS * 3);
      updatedAt = new Date();
      report(`Updated at ${clock(updatedAt)}.`, false);
    } catch (error) {
      if (signal.aborted) return;
      wait = Math.min(wait * 1.5, LONGEST_MS);
      report(`Not updated since ${clock(updatedAt)}: ${error.message}.`, true);
    }
    plan();
  }

  function pause() {
    clearTimeout(timer);
    if (request) request.abort();
  }

  function stop(sentence) {
    stopped = true;
    pause();
    button.textContent = "Go on updating";
    report(sentence, true);
  }

  button.addEventListener("click", () => {
    if (!stopped) {
      stop(`Not updated since ${clock(updatedAt)}.`);
    } else {
      stopped = false;
      button.textContent = "Stop updates";
      wait = SHORTEST_MS;
      update();
    }
  });

  // A hidden page costs the broker nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) pause();
    else if (!stopped) { wait = SHORTEST_MS; update(); }
  });

  bar.hidden = false;
  report(`Updated at ${clock(updatedAt)}.`, false);
  plan();
})();
