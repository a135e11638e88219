// The frame: the head of the page, which view is open, keys that work everywhere, and what is known of all runs.
import { button, el, forgetColours, icon, replace } from "./dom.js";
import { remember } from "./kept.js";
import { get, Stream } from "./net.js";
import { compare } from "./views/compare.js";
import { overview } from "./views/overview.js";
import { run } from "./views/run.js";
import { currentLanguage, LANGUAGES, loadWords, t } from "./words.js";

/** What views share: the rows of all runs, the clock of the server, what is selected, and how to go elsewhere. */
const app = { rows: new Map(), skipped: [], offset: 0, selected: new Set(), filter: {}, loaded: false, now: () => Date.now() / 1000 + app.offset, go, note, crumbs };
const byId = (id) => document.getElementById(id);
const main = byId("main");
const link = el("span.link");
const path = el("nav.crumbs");
const KEYS = [["j k ↓ ↑", "keys.move"], ["Enter", "keys.open"], ["x", "keys.select"], ["c", "keys.compare"], ["/", "keys.search"], ["1 … 5", "keys.tabs"],
	["[ ]", "keys.steps"], ["← →", "keys.cursor"], ["+ − 0", "keys.zoom"], ["t", "keys.theme"], ["Esc", "keys.back"]];
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

function note(text) {
	const one = el("div.note", text);
	byId("notes").append(one);
	setTimeout(() => one.remove(), 4000);
}

function crumbs(...entries) {
	const last = entries.length;
	replace(path, [[t("runs"), "#/"], ...entries].map(([text, href], place) => [
		place ? el("span.dim!", "/") : null,
		place < last && href ? el("a", { href }, text) : el("span", { "aria-current": "page" }, text)]));
	document.title = last ? `${entries[last - 1][0]} · Shoal` : "Shoal";
	path.setAttribute("aria-label", t("path"));
}

function head() {
	const theme = document.documentElement.dataset.theme ?? "auto";
	const other = currentLanguage() === "en" ? "zh" : "en";
	byId("skip").textContent = t("skip");
	replace(byId("top"),
		el("a.brand", { href: "#/" }, el("img", { src: "page/icon.svg", alt: "", width: 22, height: 22 }), "Shoal"),
		path, el("span.room"), link,
		icon({ auto: "◐", light: "☀", dark: "☾" }[theme], t("theme", { theme: t(`theme.${theme}`) }), turnTheme, { id: "theme" }),
		button(LANGUAGES[other], () => speak(other), { class: "quiet", id: "language", lang: other === "zh" ? "zh-CN" : "en", title: t("language") }),
		icon("?", t("keys"), help, { id: "keys" }));
	showConnection(connection);
}

function showConnection(state, seconds = 0) {
	connection = state;
	link.className = `link ${state}`;
	link.setAttribute("role", "status");
	const text = { open: t("live"), away: t("away", { seconds: Math.round(seconds) }), refused: t("refused") }[state];
	replace(link, el("span.dot!"), text);
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
	const dialog = el("dialog.help", { "aria-label": t("keys") },
		el("h2", t("keys")),
		el("dl", KEYS.map(([keys, key]) => [el("dt", keys.split(" ").map((one) => el("kbd", one))), el("dd", t(key))])),
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
	const rows = [];
	let answer = { next: 0 };
	while (answer.next !== null) {
		answer = await get("runs", { offset: answer.next });
		rows.push(...answer.runs.map((row) => [row.id, row]));
	}
	app.offset = answer.now - Date.now() / 1000;
	app.rows = new Map(rows);
	app.skipped = answer.skipped;
	app.loaded = true;
	view?.rows?.(null);
}

function heard(kind, value) {
	if (kind === "runs") {
		for (const row of value.runs) app.rows.set(row.id, row);
		app.offset = value.now - Date.now() / 1000;
		view?.rows?.(value.runs);
	} else if (kind === "gone") {
		app.rows.delete(value.id);
		view?.rows?.(null);
	} else if (kind === "reset") refresh().then(() => view?.again?.()).catch(failed);
	else view?.points?.(value);
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
new Stream(heard, showConnection);
