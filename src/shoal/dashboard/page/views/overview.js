// All runs: a table to search, sort and filter, and the curves of those that are selected, one over the other.
import { button, dim, el, empty, replace, select, svg } from "../dom.js";
import { age, bytes, clock, compact, exact, integer, number, seconds } from "../format.js";
import { said, t } from "../words.js";
import { overlay } from "./overlay.js";

export const GLYPHS = { running: "▶", completed: "✓", interrupted: "‖", failed: "✕", silent: "◌" };
const ORDER = { failed: 0, silent: 1, running: 2, interrupted: 3, completed: 4 };

export function pill(status) {
	return el("span", { class: `pill ${status}` }, el("span!", GLYPHS[status] ?? "·"), t(`status.${status}`));
}

export function spark(values, width = 96, height = 22) {
	const known = (values ?? []).filter((one) => one !== null && Number.isFinite(one));
	if (known.length < 2) return dim("–");
	const [low, high] = [Math.min(...known), Math.max(...known)];
	const x = (place) => (place / (values.length - 1)) * (width - 4) + 2;
	const y = (value) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
	const lines = [[]];
	values.forEach((one, place) => { if (one === null) lines.push([]); else lines.at(-1).push(`${x(place).toFixed(1)},${y(one).toFixed(1)}`); });
	const label = t("spark", { first: number(known[0]), last: number(known.at(-1)), low: number(low), high: number(high) });
	return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
		lines.filter((one) => one.length).map((one) => svg("polyline", { points: one.join(" ") })));
}

function culprit(row) {
	const one = row.culprit;
	if (!one) return null;
	const where = [one.rank == null ? null : t("rank", { rank: one.rank }), one.host].filter(Boolean).join(" · ");
	return el("span.culprit", { title: one.cause }, el("b", [where, one.phase].filter(Boolean).join(" · ")), " ", said(one.cause ?? "", one.words));
}

function progress(row) {
	const share = row.total_steps ? Math.min(1, row.step / row.total_steps) : 0;
	return [el("span", integer(row.step), row.total_steps ? dim(` / ${integer(row.total_steps)}`) : null),
		row.total_steps ? el("span.bar!", el("span", { style: { width: `${share * 100}%` } })) : null];
}

// key, how a cell looks, what is sorted by, and whether it is a number (then the largest first).
const COLUMNS = [
	["status", (row) => pill(row.status), (row) => ORDER[row.status] ?? 9],
	["name", (row) => [el("a", { href: `#/run/${row.id}/curves`, title: row.name }, row.name), proof(row), culprit(row)], (row) => row.name.toLowerCase()],
	["plan", (row) => el("span.mono", { title: row.plan }, row.plan || "–"), (row) => row.plan ?? ""],
	["spark", (row) => spark(row.spark), null],
	["loss", (row) => el("span", { title: exact(row.loss) }, number(row.loss)), (row) => row.loss, true],
	["validation_loss", (row) => el("span", { title: exact(row.validation_loss) }, number(row.validation_loss)), (row) => row.validation_loss, true],
	["step", progress, (row) => row.step, true],
	["tokens_per_s", (row) => compact(row.tokens_per_s), (row) => row.tokens_per_s, true],
	["step_seconds", (row) => seconds(row.step_seconds), (row) => row.step_seconds, true],
	["memory", (row) => bytes(row.memory_bytes), (row) => row.memory_bytes, true],
	["updated", (row, app) => el("time", { title: clock(row.updated), "data-t": row.updated }, age(app.now() - row.updated)), (row) => row.updated, true],
];

export function proof({ proof: found }) {
	return found ? el(found === "ok" ? "span.mark.good" : "span.mark.bad", { title: t(`proof.${found}`) }, found === "ok" ? `✓ ${t("proved")}` : `✕ ${t("refuted")}`) : null;
}

/** True where every word of the search is in what a row says of itself. */
function matches(row, filter) {
	if (filter.status && row.status !== filter.status) return false;
	if (filter.kind && row.kind !== filter.kind) return false;
	const text = `${row.name} ${row.plan} ${row.status} ${row.hash ?? ""} ${row.culprit?.host ?? ""} ${row.culprit?.cause ?? ""}`.toLowerCase();
	return (filter.search ?? "").toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

export function overview(app) {
	app.crumbs();
	const filter = app.filter;
	filter.sort ??= "updated";
	const found = new Map();
	let current = null;
	const body = el("tbody");
	const chips = el("div.chips", { role: "group", "aria-label": t("column.status") });
	const picked = el("div.picked");
	const above = el("div.overlay");
	const skipped = el("div");
	const count = el("span.dim", { role: "status" });
	const nothing = el("div");
	const search = el("input", { type: "search", id: "search", placeholder: t("search.runs"), "aria-label": t("search.runs"), value: filter.search ?? "",
		oninput: () => { filter.search = search.value; list(); } });
	let curves = null;

	const heads = COLUMNS.map(([key, , sort, isNumber]) => el("th", { scope: "col", class: `c-${key}${isNumber ? " number" : ""}` },
		sort ? button(t(`column.${key}`), () => sortBy(key, isNumber), { class: "sort" }) : t(`column.${key}`)));
	const every = el("input", { type: "checkbox", "aria-label": t("select.all"), onchange: () => {
		for (const row of shown()) every.checked ? app.selected.add(row.id) : app.selected.delete(row.id);
		list();
	} });

	function sortBy(key, isNumber) {
		filter.down = filter.sort === key ? !filter.down : Boolean(isNumber);
		filter.sort = key;
		list();
	}

	function shown() {
		const by = COLUMNS.find(([key]) => key === filter.sort)[2];
		const down = filter.down ?? true;
		const known = (value) => value != null && !Number.isNaN(value);
		return [...app.rows.values()].filter((row) => matches(row, filter)).sort((one, other) => {
			const [a, b] = [by(one), by(other)];
			if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : 0;
			return (a < b ? -1 : a > b ? 1 : one.name < other.name ? -1 : 1) * (down ? -1 : 1);
		});
	}

	function line(row) {
		const box = el("input", { type: "checkbox", "aria-label": t("select.run", { name: row.name }), checked: app.selected.has(row.id), onchange: () => pick(row.id, box.checked) });
		const node = el("tr", { tabindex: -1, "data-id": row.id }, el("td.c-box", box),
			COLUMNS.map(([key, show, , isNumber]) => el(key === "name" ? "th" : "td",
				{ class: `c-${key}${isNumber ? " number" : ""}`, scope: key === "name" ? "row" : null }, show(row, app))));
		node.addEventListener("click", (event) => { if (!event.target.closest("a, input, button") && !String(getSelection())) app.go(`/run/${row.id}/curves`); });
		node.addEventListener("focus", () => { current = row.id; });
		return node;
	}

	function list() {
		const rows = shown();
		found.clear();
		replace(body, rows.map((row) => { const node = line(row); found.set(row.id, node); return node; }));
		heads.forEach((head, place) => head.setAttribute("aria-sort", COLUMNS[place][0] === filter.sort ? ((filter.down ?? true) ? "descending" : "ascending") : "none"));
		const first = found.get(current) ?? body.firstChild;
		if (first) first.tabIndex = 0;
		replace(count, t("shown", { shown: rows.length, all: app.rows.size }));
		replace(nothing, !app.loaded ? el("p.loading", t("loading")) : rows.length ? null : app.rows.size ? empty(t("no.match"), t("no.match.hint")) : empty(t("no.runs"), t("no.runs.hint")));
		every.checked = rows.length > 0 && rows.every((row) => app.selected.has(row.id));
		status();
		selection();
		replace(skipped, app.skipped.length ? el("details.skipped", el("summary", t("skipped", { count: app.skipped.length })),
			el("ul", app.skipped.map((one) => el("li", el("b", one.name), " ", one.reason)))) : null);
	}

	function status() {
		const counts = {};
		for (const row of app.rows.values()) counts[row.status] = (counts[row.status] ?? 0) + 1;
		replace(chips, ["", ...Object.keys(ORDER).filter((key) => counts[key] || filter.status === key)].map((key) =>
			button([key ? el("span!", { class: `glyph ${key}` }, GLYPHS[key]) : null, key ? t(`status.${key}`) : t("all"), el("span.count", key ? counts[key] ?? 0 : app.rows.size)],
				() => { filter.status = key; list(); }, { class: "chip", "data-status": key, "aria-pressed": String((filter.status ?? "") === key) })));
	}

	function pick(id, on) {
		on ? app.selected.add(id) : app.selected.delete(id);
		selection();
	}

	function selection() {
		const ids = [...app.selected].filter((id) => app.rows.has(id));
		replace(picked, ids.length ? [el("span", t("selected", { count: ids.length })),
			ids.length > 1 ? el("a.button.primary", { href: `#/compare?ids=${ids.join(",")}` }, t("compare")) : null,
			button(t("clear"), () => { app.selected.clear(); list(); }, { class: "quiet" })] : null);
		const wanted = ids.slice(0, 10).join(",");
		if (wanted === above.dataset.ids) return;
		above.dataset.ids = wanted;
		curves?.end();
		curves = wanted ? overlay(app, ids.slice(0, 10), ids.length) : null;
		replace(above, curves?.node);
	}

	function move(by) {
		const lines = [...body.children];
		if (!lines.length) return;
		const place = lines.findIndex((one) => one.dataset.id === current && one.contains(document.activeElement));
		const next = lines[Math.max(0, Math.min(lines.length - 1, place + by))] ?? lines[0];
		for (const one of lines) one.tabIndex = one === next ? 0 : -1;
		next.focus();
	}

	const kinds = select(t("filter.kind"), [["", t("kind.all")], ...["training", "servers", "simulated"].map((one) => [one, t(`kind.${one}`)])], filter.kind ?? "", (value) => { filter.kind = value; list(); });
	const node = el("div.overview", {},
		el("h1.unseen", t("runs")),
		el("div.bar-tools", el("div.searchbox", search, el("kbd!", "/")), chips, kinds, el("span.room"), picked, count),
		above,
		el("div.scroll.runs", { role: "region", "aria-label": t("runs"), tabindex: -1 }, el("table.runs", el("caption.unseen", t("runs")),
			el("thead", el("tr", el("td.c-box", every), heads)), body)),
		nothing, skipped);
	list();

	return {
		node,
		end: () => curves?.end(),
		rows(changed) {
			// A row that changed is drawn anew where it stands; all are put in order again only when one comes or goes.
			if (changed?.every((row) => found.has(row.id) === matches(row, filter))) {
				for (const row of changed) if (found.has(row.id)) freshen(row);
				status();
				return;
			}
			const had = document.activeElement?.closest?.("tr[data-id]")?.dataset.id;
			list();
			if (had) found.get(had)?.focus({ preventScroll: true });
		},
		points: (value) => curves?.points(value),
		again: () => curves?.again(),
		tick() { for (const one of body.querySelectorAll("time")) one.textContent = age(app.now() - Number(one.dataset.t)); },
		key(event) {
			const row = document.activeElement?.closest?.("tr[data-id]");
			if (event.key === "j" || event.key === "ArrowDown") move(1);
			else if (event.key === "k" || event.key === "ArrowUp") move(row ? -1 : 0);
			else if (event.key === "Enter" && document.activeElement === row && row) app.go(`/run/${row.dataset.id}/curves`);
			else if (event.key === "x" && row) { const box = row.querySelector("input"); box.checked = !box.checked; pick(row.dataset.id, box.checked); }
			else if (event.key === "c" && app.selected.size > 1) app.go(`/compare?ids=${[...app.selected].join(",")}`);
			else return false;
			return true;
		},
	};

	/** Cell by cell: the row keeps its focus and the box its state. */
	function freshen(row) {
		const fresh = line(row).children;
		[...found.get(row.id).children].forEach((cell, place) => { if (place && !cell.contains(document.activeElement)) cell.replaceChildren(...fresh[place].childNodes); });
	}
}
