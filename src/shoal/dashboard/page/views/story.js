// What happened, in words; the logs of every rank; the recipe and its difference to another run; certificates.
import { button, card, copier, dim, el, empty, icon, replace, segments, select, table } from "../dom.js";
import { any, bytes, clock, integer, number } from "../format.js";
import { get } from "../net.js";
import { said, t } from "../words.js";
import { differences } from "./compare.js";

const LEVELS = { info: "·", warning: "!", error: "✕" };
const PAGE = 65536;

export function journal(app, run) {
	const state = { level: "", search: "" };
	const list = el("ol.events");
	const more = el("div");
	const search = el("input", { type: "search", placeholder: t("search.story"), "aria-label": t("search.story"), oninput: () => { state.search = search.value; clearTimeout(timer); timer = setTimeout(load, 150); } });
	let timer = 0, isDirty = false, loadedAt = 0, next = null;

	async function load(after) {
		[loadedAt, isDirty] = [Date.now(), false];
		const answer = await get(`run/${run.id}/story`, { ...state, after: typeof after === "number" || typeof after === "string" ? after : null });
		const items = answer.items.map(item);
		if (after === undefined || typeof after === "object") replace(list, items.length ? items : el("li.none.dim", t("no.events")));
		else list.append(...items);
		next = answer.next;
		replace(more, next === null ? null : button(t("more"), () => load(next)));
	}

	const tools = el("div.bar-tools", el("div.searchbox", search, el("kbd!", "/")),
		segments(t("level"), [["", t("all")], ...["warning", "error"].map((one) => [one, t(`level.${one}`)])], "", (value) => { state.level = value; load(); }));
	const logs = logViewer(app, run);
	const node = el("div.journal", {},
		el("div.withside.even", card(t("story"), null, tools, list, more), el("div", logs.node, certificates(run.certificates), recipe(app, run))));
	const fail = (error) => app.note(error.message);
	load().catch(fail);
	return { node, again: load, points() { isDirty = true; }, changed() { isDirty = true; },
		header(header) { run = header; },
		tick() { if (isDirty && Date.now() - loadedAt > 4000 && list.scrollTop < 40) load().catch(() => {}); } };
}

function item(one) {
	const command = one.kind === "advice" ? one.words[1].command : null;
	return el(`li.${one.level}`, { "data-kind": one.kind }, el("time", { title: clock(one.t) }, one.t == null ? "" : clock(one.t, false)),
		el("span.level", { title: t(`level.${one.level}`), role: "img", "aria-label": t(`level.${one.level}`) }, LEVELS[one.level]),
		el("span.text", said(one.text, one.words), command ? copier(command) : null, one.traceback ? el("details", el("summary", t("traceback")), el("pre", { tabindex: 0 }, one.traceback)) : null),
		dim([one.step == null ? null : t("step.of", { step: integer(one.step) }), one.rank == null || one.rank < 0 ? null : t("rank", { rank: one.rank })].filter(Boolean).join(" · ")));
}

function logViewer(app, run) {
	const names = (run.logs ?? []).map((one) => one.name);
	const text = el("pre.log", { tabindex: 0, "aria-label": t("log") });
	const where = el("span.dim");
	const search = el("input", { type: "search", placeholder: t("search.log"), "aria-label": t("search.log"), oninput: () => { clearTimeout(timer); timer = setTimeout(() => load(search.value ? 0 : -PAGE), 200); } });
	let chosen = names[0], timer = 0, asked = 0, place = { from: 0, to: 0, size: 0 };

	async function load(at) {
		if (!chosen) return;
		const own = ++asked;
		try {
			for (let from = at; ; from = place.to) {
				const answer = await get(`run/${run.id}/log`, { name: chosen, at: from, search: search.value });
				if (own !== asked) return;
				place = answer;
				const isOver = place.found !== false || place.to >= place.size;
				replace(where, isOver && place.found === false ? t("log.nothing") : place.size ? t("log.part", { from: bytes(place.from), to: bytes(place.to), size: bytes(place.size) }) : t("log.empty"));
				if (isOver) break;
			}
			replace(text, marked(place.text, search.value));
			text.scrollTop = at < 0 ? text.scrollHeight : 0;
		} catch (error) { app.note(error.message); }
	}

	const node = names.length ? card(t("logs"), null,
		el("div.bar-tools", select(t("log"), run.logs.map((one) => [one.name, `${one.name} · ${bytes(one.bytes)}`]), chosen, (value) => { chosen = value; load(-PAGE); }), search,
			[["⇤", "first", () => 0], ["‹", "before", () => Math.max(0, place.from - PAGE)], ["›", "after", () => place.next ?? (place.to < place.size ? place.to : -PAGE)], ["⇥", "last", () => -PAGE]].map(([sign, key, at]) =>
				icon(sign, t(`log.${key}`), () => load(at())))),
		text, where) : card(t("logs"), null, empty(t("no.logs")));
	load(-PAGE);
	return { node };
}

/** Text in which what was searched for stands out. */
function marked(text, wanted) {
	if (!wanted) return text;
	const parts = [];
	const [lower, needle] = [text.toLowerCase(), wanted.toLowerCase()];
	let from = 0;
	for (let at = lower.indexOf(needle); at >= 0 && parts.length < 4000; at = lower.indexOf(needle, from)) {
		parts.push(text.slice(from, at), el("mark", text.slice(at, at + needle.length)));
		from = at + needle.length;
	}
	parts.push(text.slice(from));
	return parts;
}

function certificates(list) {
	const rows = (list ?? []).flatMap((one) => one.plans.map((plan) => ({ ...plan, bugs: one })));
	if (!rows.length) return null;
	return card(t("certificates"), null, table(t("certificates"), ["column.plan", "result", "worst", "mutants"].map((key) => ({ text: t(key) })), rows.map((one) => [el("span.mono", any(one.plan)),
		one.ok ? el("span.mark.good", "✓ ", t(one.bitwise ? "bitwise" : "within")) : el("span.mark.bad", "✕ ", t("refuted")),
		one.worst ? Object.entries(one.worst).map(([key, value]) => `${key} ${number(value)}`).join(", ") : "–",
		one.bugs.mutants ? t("caught", { caught: one.bugs.mutants_caught, all: one.bugs.mutants }) : "–"])));
}

function recipe(app, run) {
	if (!run.recipe) return null;
	const text = el("pre", { tabindex: 0, class: "recipe" }, run.recipe);
	const place = el("div", text);
	const others = [...app.rows.values()].filter((row) => row.id !== run.id).slice(0, 500);
	const against = select(t("against"), [["", t("recipe.whole")], ...others.map((row) => [row.id, t("against.run", { name: row.name })])], "", async (id) => {
		if (!id) { replace(place, text); return; }
		try {
			const answer = await get("compare", { ids: `${run.id},${id}` });
			const names = [run.name, app.rows.get(id).name];
			replace(place, differences(t("recipe"), answer.recipe, names), differences(t("column.plan"), answer.plan, names));
		} catch (error) { app.note(error.message); }
	});
	return card(t("recipe"), against, place);
}
