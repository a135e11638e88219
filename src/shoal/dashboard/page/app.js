// The frame: the head of the page, which view is open, keys that work everywhere, and what is known of all runs.
import { button, el, forgetColours, remember, replace } from "./dom.js";
import { get, Stream } from "./net.js";
import { compare } from "./views/compare.js";
import { overview } from "./views/overview.js";
import { run } from "./views/run.js";
import { currentLanguage, LANGUAGES, loadWords, t } from "./words.js";

/** What views share: the rows of all runs, the clock of the server, what is selected, and how to go elsewhere. */
const app = { rows: new Map(), skipped: [], offset: 0, selected: new Set(), filter: {}, loaded: false, now: () => Date.now() / 1000 + app.offset, go, note, crumbs };
const main = document.getElementById("main");
const link = el("span", { class: "link" });
const path = el("nav", { class: "crumbs" });
const KEYS = [["j k ↓ ↑", "keys.move"], ["Enter", "keys.open"], ["x", "keys.select"], ["c", "keys.compare"], ["/", "keys.search"], ["1 … 5", "keys.tabs"],
  ["[ ]", "keys.steps"], ["← →", "keys.cursor"], ["+ − 0", "keys.zoom"], ["t", "keys.theme"], ["Esc", "keys.back"], ["?", "keys.help"]];
let view = null;
let connection = "away";

export function address() {
  const [place, query] = location.hash.replace(/^#/, "").split("?");
  return { parts: place.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query ?? "") };
}

function go(place, { quietly = false } = {}) {
  if (quietly) history.replaceState(null, "", `#${place}`);
  else location.hash = place;
}

function note(text, command) {
  const one = el("div", { class: "note" }, el("span", {}, text), command ? el("code", {}, command) : null);
  document.getElementById("notes").append(one);
  setTimeout(() => one.remove(), 4000);
}

function crumbs(...entries) {
  const last = entries.length;
  replace(path, [[t("runs"), "#/"], ...entries].map(([text, href], place) => [
    place ? el("span", { class: "dim", "aria-hidden": "true" }, "/") : null,
    place < last && href ? el("a", { href }, text) : el("span", { "aria-current": "page" }, text)]));
  document.title = last ? `${entries[last - 1][0]} · Shoal` : "Shoal";
  path.setAttribute("aria-label", t("path"));
}

function head() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  const other = currentLanguage() === "en" ? "zh" : "en";
  document.getElementById("skip").textContent = t("skip");
  replace(document.getElementById("top"),
    el("a", { class: "brand", href: "#/" }, el("img", { src: "page/icon.svg", alt: "", width: 22, height: 22 }), "Shoal"),
    path, el("span", { class: "room" }), link,
    button({ auto: "◐", light: "☀", dark: "☾" }[theme], turnTheme, { class: "quiet", id: "theme", "aria-label": t("theme", { theme: t(`theme.${theme}`) }), title: t("theme", { theme: t(`theme.${theme}`) }) }),
    button(LANGUAGES[other], () => speak(other), { class: "quiet", id: "language", lang: other === "zh" ? "zh-CN" : "en", title: t("language") }),
    button("?", help, { class: "quiet", id: "keys", "aria-label": t("keys"), title: t("keys") }));
  showConnection(connection);
}

function showConnection(state, seconds = 0) {
  connection = state;
  link.className = `link ${state}`;
  link.setAttribute("role", "status");
  const text = { open: t("live"), away: t("away", { seconds: Math.round(seconds) }), refused: t("refused") }[state];
  replace(link, el("span", { class: "dot", "aria-hidden": "true" }), text);
}

function turnTheme() {
  const root = document.documentElement;
  const next = { auto: "light", light: "dark", dark: "auto" }[root.dataset.theme ?? "auto"];
  if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
  remember("theme", next === "auto" ? null : next);
  forgetColours();
  document.dispatchEvent(new Event("themechange"));
  head();
}

async function speak(language) {
  await loadWords(language);
  head();
  open();
}

function help() {
  const dialog = el("dialog", { class: "help", "aria-label": t("keys") },
    el("h2", {}, t("keys")),
    el("dl", {}, KEYS.map(([keys, key]) => [el("dt", {}, keys.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, t(key))])),
    button(t("close"), () => dialog.close(), { class: "primary" }));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function open() {
  view?.end?.();
  const { parts, query } = address();
  const make = { run, compare }[parts[0]] ?? overview;
  view = make(app, parts.slice(1), query);
  replace(main, view.node);
  scrollTo(0, 0);
}

function moved() {
  const { parts, query } = address();
  if (view?.moved?.(parts, query)) return;
  open();
  main.focus({ preventScroll: true });
}

async function refresh() {
  const answer = await get("runs");
  app.offset = answer.now - Date.now() / 1000;
  app.rows = new Map(answer.runs.map((row) => [row.id, row]));
  app.skipped = answer.skipped ?? [];
  app.loaded = true;
  view?.rows?.(null);
}

function heard(kind, value) {
  if (kind === "runs") {
    for (const row of value.runs ?? value) app.rows.set(row.id, { ...app.rows.get(row.id), ...row });
    if (value.now) app.offset = value.now - Date.now() / 1000;
    view?.rows?.(value.runs ?? value);
  } else if (kind === "gone") {
    for (const id of [value.id ?? value.ids ?? []].flat()) app.rows.delete(id);
    view?.rows?.(null);
  } else view?.points?.(value);
}

function failed(error) {
  if (error.status === 401 || error.status === 403) showConnection("refused");
  else note(error.message);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), textarea, select");
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (!view?.key?.(event) && address().parts.length) go("/");
    return;
  }
  if (typing) return;
  const known = { "?": help, t: turnTheme, "/": () => main.querySelector("input[type=search]")?.focus() }[event.key];
  if (known) { event.preventDefault(); known(); } else if (view?.key?.(event)) event.preventDefault();
});
addEventListener("hashchange", moved);
setInterval(() => view?.tick?.(), 1000);

await loadWords();
head();
open();
await refresh().catch(failed);
new Stream(heard, (state, detail) => {
  showConnection(state, detail);
  // What happened while the server was away is asked for, not guessed.
  if (state === "open" && detail) refresh().then(() => view?.again?.()).catch(failed);
});
