// One run: what it is and how it stands, and its tabs.
import { copier, dim, el, empty, replace } from "../dom.js";
import { age, bytes, clock, compact, exact, integer, number, seconds } from "../format.js";
import { get, liveRanks } from "../net.js";
import { said, t } from "../words.js";
import { agreement } from "./agreement.js";
import { pill, proof } from "./overview.js";
import { ranks } from "./ranks.js";
import { journal } from "./story.js";
import { timeline } from "./timeline.js";
import { wall } from "./wall.js";

const TABS = {
	curves: (app, run, place) => wall(app, { runs: [{ id: run.id, label: run.name }], curves: run.curves, ranks: (run.ranks ?? []).map((one) => one.rank), query: place.query, onquery: place.onquery }),
	timeline, ranks, agreement, story: journal,
};

export function run(app, [id, chosen = "curves"], query) {
	const head = el("div.runhead");
	const tabs = el("div.tabs", { role: "tablist", "aria-label": t("views") });
	const panel = el("div.panel", { role: "tabpanel", id: "panel", tabindex: -1 });
	const node = el("div.run", head, tabs, panel);
	let header = null, tab = null, name = chosen in TABS ? chosen : "curves", refreshing = 0, refreshedAt = 0, last = query;

	function place(query) {
		return { query, onquery: (values) => {
			last = new URLSearchParams(values);
			const text = last.toString();
			app.go(`/run/${id}/${name}${text ? `?${text}` : ""}`, { quietly: true });
		} };
	}

	function show(query) {
		tab?.end?.();
		replace(tabs, Object.keys(TABS).map((one, number) => el("a", { role: "tab", id: `tab-${one}`, href: `#/run/${id}/${one}`, "aria-selected": String(one === name), "aria-controls": "panel", title: String(number + 1) }, t(`tab.${one}`))));
		panel.setAttribute("aria-labelledby", `tab-${name}`);
		tab = TABS[name](app, header, place(query));
		replace(panel, tab.node);
	}

	async function load(first) {
		refreshedAt = Date.now();
		const had = header?.curves.length;
		header = await get(`run/${id}`);
		if (!app.rows.has(id)) app.rows.set(id, { ...header, plan: header.plan.plan });
		summary();
		// A run that was opened before its first step gets its curves later.
		if (first || (name === "curves" && had !== header.curves.length)) show(last); else tab?.header?.(header);
	}

	function summary() {
		const row = { ...header, ...app.rows.get(id) };
		app.crumbs([row.name, null]);
		replace(head, title(row), blamed(row, header.live), facts(app, row, header), broken(header), commands(row, header.live));
	}

	load(true).catch((error) => replace(node, empty(error.status === 404 ? t("no.run") : error.message, t("no.run.hint"))));
	return {
		node,
		end: () => { clearTimeout(refreshing); tab?.end?.(); },
		moved(parts, query) {
			if (parts[0] !== "run" || parts[1] !== id || !header) return false;
			name = parts[2] in TABS ? parts[2] : "curves";
			show(query);
			return true;
		},
		rows(changed) {
			if (!header || (changed && !changed.some((one) => one.id === id))) return;
			summary();
			tab?.changed?.();
			// What is not in the row (live state, generations, logs) is asked for at most every two seconds.
			clearTimeout(refreshing);
			refreshing = setTimeout(() => load(false).catch(() => {}), Math.max(0, 2000 - (Date.now() - refreshedAt)));
		},
		points(value) { if (value.id === id) tab?.points?.(value); },
		again() { load(false).then(() => tab?.again?.()).catch((error) => app.note(error.message)); },
		tick() {
			for (const one of head.querySelectorAll("time")) one.textContent = age(app.now() - Number(one.dataset.t));
			tab?.tick?.();
		},
		key(event) {
			const wanted = Object.keys(TABS)[Number(event.key) - 1];
			if (wanted) app.go(`/run/${id}/${wanted}`);
			else return tab?.key?.(event) ?? false;
			return true;
		},
	};
}

function title(row) {
	return el("div.title", el("h1", row.name), pill(row.status), el("span.kind", t(`kind.${row.kind}`)),
		proof(row));
}

/** Who is to blame where the run failed or stands still. */
function blamed(row, live) {
	const hang = row.status === "running" || row.status === "silent" ? live?.hang : null;
	if (hang) {
		const host = liveRanks(live).find((one) => one.rank === hang.rank)?.host;
		return el("div.blame", { role: "alert" }, el("b", t("hangs", { rank: hang.rank ?? hang.name, phase: hang.phase, seconds: seconds(hang.seconds) })), host ? dim(` ${t("on.host", { host })}`) : null);
	}
	const one = row.culprit;
	if (!one) return null;
	return el("div.blame", { role: "alert" }, el("b", t("culprit", { rank: one.rank ?? "–", host: one.host || "–", phase: one.phase || "–" })), " ", el("span", said(one.cause ?? "", one.words)));
}

function facts(app, row, header) {
	const entries = [
		["step", [integer(row.step), row.total_steps ? dim(` / ${integer(row.total_steps)}`) : null]],
		["loss", number(row.loss), exact(row.loss)],
		["validation_loss", number(row.validation_loss), exact(row.validation_loss)],
		["tokens_per_s", compact(row.tokens_per_s), exact(row.tokens_per_s)],
		["step_seconds", seconds(row.step_seconds), exact(row.step_seconds)],
		["memory", bytes(row.memory_bytes), exact(row.memory_bytes)],
		["ranks", integer(row.world_size)],
		row.eta_s == null ? null : ["eta", seconds(row.eta_s)],
		["started", clock(row.started || null)],
		["updated", el("time", { "data-t": row.updated, title: clock(row.updated) }, age(app.now() - row.updated))],
		header.generations?.length > 1 ? ["generations", integer(header.generations.length)] : null,
		row.hash ? ["hash", el("span.mono", { title: row.hash }, row.hash.slice(0, 12))] : null,
	].filter(Boolean);
	return [el("dl.facts", entries.map(([key, value, title]) => el("div", { "data-fact": key, title: title ?? null }, el("dt", t(`column.${key}`)), el("dd", value)))),
		el("p.planline.mono", row.plan)];
}

function broken(header) {
	const kinds = Object.entries(header.unknown_kinds ?? {});
	if (!header.broken_lines && !kinds.length) return null;
	return el("p.warn", [header.broken_lines ? t("broken.lines", { count: integer(header.broken_lines) }) : null,
		kinds.length ? t("unknown.kinds", { kinds: kinds.map(([kind, count]) => `${kind} (${count})`).join(", ") }) : null].filter(Boolean).join(" "));
}

/** The page is read-only: what one would press is a command to copy. */
function commands(row, live) {
	const name = /^\w[\w./-]*$/.test(row.name) ? row.name : `'./${row.name.replaceAll("'", "'\\''")}'`;
	const hung = Number(liveRanks(live).find((one) => one.rank === live.hang?.rank)?.pid);
	const entries = row.status === "running" || row.status === "silent"
		? [Number.isInteger(live?.pid) ? ["stop", `kill -TERM ${live.pid}`] : null, ["top", `shoal top ${name}`], Number.isInteger(hung) ? ["stacks", `kill -USR1 ${hung}`] : null]
		: [["report", `shoal report ${name} --html report.html`], row.status === "completed" ? null : ["resume", "shoal train RECIPE --resume --run-dir " + name]];
	const details = el("details.commands", el("summary", t("commands")), el("p.dim", t("commands.why", { host: live?.host || "–" })),
		el("ul", entries.filter(Boolean).map(([key, text]) => el("li", el("span", t(`command.${key}`)), el("code", text), copier(text)))));
	details.open = commands.isOpen ?? false;
	details.addEventListener("toggle", () => { commands.isOpen = details.open; });
	return details;
}
