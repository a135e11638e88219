// The page's words in the reader's language: that of the browser, or the one that was chosen.
import { recall, remember } from "./kept.js";

export const LANGUAGES = { en: "English", zh: "中文" };
let words = null;
let language = "en";

export async function loadWords(chosen) {
	const wanted = chosen ?? recall("language") ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
	language = wanted in LANGUAGES ? wanted : "en";
	if (chosen) remember("language", chosen);
	words ??= await (await fetch("page/words.json")).json();
	document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

export function currentLanguage() { return language; }

const find = (key) => words[key]?.[Object.keys(LANGUAGES).indexOf(language)];

export function has(key) { return Boolean(find(key)); }

/** The words of a key, with `{name}` replaced by values. */
export function t(key, values) {
	const text = find(key) ?? key;
	return values ? text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole)) : text;
}

/** What the server says: its English sentence, or ours where it names one and we have it. */
export function said(text, named) {
	return language !== "en" && named && has(`said.${named[0]}`) ? t(`said.${named[0]}`, named[1]) : text;
}
