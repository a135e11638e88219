// What every rank did in a step, above what the schedule planned and what the planner predicted.
import { asTable, button, card, column, dim, el, empty, icon, replace, select, table } from "../dom.js";
import { bytes, integer, percent, seconds } from "../format.js";
import { cellOf, Gantt, kindOf } from "../draw/gantt.js";
import { get } from "../net.js";
import { has, t } from "../words.js";

const LEGEND = ["forward", "backward", "weight", "optimizer", "comm", "wait", "data", "checkpoint", "other"];

/** A grid of slots as spans: the same cell in slots that follow each other is one span. */
export function gridSpans(row, slot) {
	const spans = [];
	row.forEach((name, place) => {
		const last = spans.at(-1);
		if (!name) return;
		if (last && last[1] === name && Math.abs(last[2] + last[3] - place * slot) < slot / 2) last[3] += slot;
		else spans.push(["cell", name, place * slot, slot, null]);
	});
	return spans;
}

const endOf = (rows) => Math.max(0, ...rows.flatMap((row) => row.spans.map(([, , start, long]) => start + long)));
const beginOf = (rows) => Math.min(0, ...rows.flatMap((row) => row.spans.map(([, , start]) => start)));

export function timeline(app, run, { query, onquery }) {
	const body = el("div");
	const tools = el("div.bar-tools");
	const details = el("aside.details.card", { "aria-live": "polite", "aria-label": t("details") }, el("p.dim", t("pick.cell")));
	const node = el("div.timeline", tools, body);
	let drawn = [], steps = run.timeline_steps ?? [], step = Number(query.get("step")) || steps.at(-1), range = null, whole = [0, 1];

	async function load() {
		if (!steps.length) { replace(body, empty(t("no.timeline"), t("no.timeline.hint"))); replace(tools); return; }
		const answer = await get(`run/${run.id}/timeline`, { step });
		steps = answer.steps ?? steps;
		step = answer.step ?? step;
		onquery({ step });
		chooser(answer);
		show(answer);
	}

	function chooser(answer) {
		const place = steps.indexOf(step);
		const turn = (by) => { const next = steps[place + by]; if (next !== undefined) { step = next; load().catch(failed); } };
		replace(tools, icon("‹", t("step.before"), () => turn(-1), { id: "step-before", disabled: place <= 0 }),
			select(t("column.step"), steps.map((one) => [one, t("step.of", { step: integer(one) })]), String(step), (value) => { step = Number(value); load().catch(failed); }, { id: "step" }),
			icon("›", t("step.after"), () => turn(1), { id: "step-after", disabled: place < 0 || place >= steps.length - 1 }),
			el("ul.legend", LEGEND.filter((kind) => usedKinds(answer).has(kind)).map((kind) => el("li", el(/comm|wait/.test(kind) ? "span.swatch.striped!" : "span.swatch!", { style: { "background-color": `var(--k-${kind})` } }), t(`k.${kind}`)))),
			el("span.room"), el("span", { id: "unzoom" }), answer.residual_s == null ? null : dim(t("residual", { seconds: seconds(answer.residual_s) })),
			answer.left_out ? dim(t("left.out", { count: integer(answer.left_out) })) : null);
	}

	function show(answer) {
		for (const one of drawn) one.gantt.end();
		const executed = (answer.executed ?? []).map((one) => ({ label: t("rank.short", { rank: one.rank }), rank: one.rank, spans: one.spans }));
		const predicted = answer.predicted?.map((one) => ({ label: t("rank.short", { rank: one.rank }), rank: one.rank, spans: one.spans }));
		const length = Math.max(endOf(executed), endOf(predicted ?? [])) || 1;
		whole = [Math.min(beginOf(executed), 0), length];
		const slots = Math.max(1, ...(answer.planned ?? []).map((row) => row.length));
		const cells = executed.flatMap((row) => row.spans.filter(([kind]) => kind === "cell"));
		const [first, last] = cells.length ? [Math.min(...cells.map((one) => one[2])), Math.max(...cells.map((one) => one[2] + one[3]))] : [0, endOf(predicted ?? []) || length];
		// The plan has slots and no times: it is drawn over the time that the cells took.
		const planned = answer.planned?.map((row, place) => ({ label: t("pp.short", { place }), rank: place, spans: gridSpans(row, (last - first) / slots).map(([kind, name, start, long, size]) => [kind, name, start + first, long, size]) }));
		const bubble = answer.bubble ?? {};
		drawn = [["executed", executed, bubble.measured], ["planned", planned, bubble.planned], ["predicted", predicted, bubble.predicted]]
			.filter(([, rows]) => rows?.length).map(([key, rows, part]) => {
				const gantt = new Gantt({ title: t(`timeline.${key}.says`, { ranks: rows.length, bubble: percent(part) }), onpick: pick, onrange: zoom });
				gantt.key = key;
				gantt.show(rows, range ?? whole);
				return { key, rows, gantt, part };
			});
		replace(body, el("div.withside", el("div.lanes", drawn.map(({ key, rows, gantt, part }) =>
			card(t(`timeline.${key}`), el("span.bubble", { "data-bubble": key }, t("bubble"), " ", el("b", percent(part))), gantt.node,
				key === "predicted" ? el("p.dim", answer.predicted_by) : null, asTable(t("as.table"), () => spansTable(key, rows))))), details));
		for (const key of ["planned", "predicted"]) if (!drawn.some((one) => one.key === key)) body.append(el("p.dim", t(`no.${key}`)));
	}

	function zoom(from, to) {
		range = from === null ? null : [Math.max(whole[0], from), Math.min(whole[1], to)];
		for (const one of drawn) { one.gantt.range = range ?? whole; one.gantt.draw(); }
		replace(tools.querySelector("#unzoom"), range ? button(t("zoom.all"), () => zoom(null, null), { class: "primary" }) : null);
	}

	function pick(gantt, row, place) {
		for (const one of drawn) one.gantt.pick(one.gantt === gantt ? [row, place] : null);
		const [kind, name, start, long, size] = gantt.rows[row].spans[place];
		const cell = kind === "cell" ? cellOf(name) : null;
		const entries = [["what", name], ["kind", t(`k.${kindOf([kind, name])}`)], ["where", gantt.rows[row].label],
			cell ? ["stage", integer(cell.stage)] : null, cell && cell.microbatch !== null ? ["microbatch", integer(cell.microbatch)] : null,
			gantt.key === "planned" ? null : ["begin", seconds(start)], gantt.key === "planned" ? null : ["took", seconds(long)], size ? ["bytes", `${bytes(size)} (${integer(size)} B)`] : null];
		// The same cell in the other pictures: that is what one wants to compare.
		for (const other of drawn) {
			if (other.gantt === gantt || other.key === "planned" || !cell) continue;
			const same = other.rows.flatMap((one) => one.spans).find((one) => one[0] === "cell" && one[1] === name);
			if (same) entries.push([`in.${other.key}`, `${seconds(same[3])} (${t("from", { time: seconds(same[2]) })})`]);
		}
		replace(details, el("h2", name), el("dl", entries.filter(Boolean).slice(1).map(([key, value]) => el("div", { "data-detail": key }, el("dt", t(`detail.${key}`)), el("dd", value)))));
	}

	function failed(error) { replace(body, empty(t("no.timeline"), error.message)); }

	load().catch(failed);
	return {
		node,
		end() { for (const one of drawn) one.gantt.end(); },
		header(header) {
			const had = steps.length;
			run = header;
			steps = header.timeline_steps ?? steps;
			if (!had && steps.length) { step = steps.at(-1); load().catch(failed); }
		},
		key(event) {
			const id = { "[": "step-before", "]": "step-after" }[event.key];
			if (event.key === "Escape" && range) zoom(null, null); else if (id) node.querySelector(`#${id}`)?.click(); else return false;
			return true;
		},
	};
}

function usedKinds(answer) {
	const planned = (answer.planned ?? []).flatMap((row) => row.filter(Boolean).map((name) => ["cell", name]));
	return new Set([...(answer.executed ?? []).flatMap((one) => one.spans), ...(answer.predicted ?? []).flatMap((one) => one.spans), ...planned].map(kindOf));
}

function spansTable(key, rows) {
	const columns = [column("column.rank", true), column("detail.what"), column("detail.kind"), column("detail.begin", true), column("detail.took", true), column("detail.bytes", true)];
	return table(t(`timeline.${key}`), columns, rows.flatMap((row) => row.spans.map((span) => [String(row.rank), span[1], has(`k.${kindOf(span)}`) ? t(`k.${kindOf(span)}`) : span[0], seconds(span[2]), seconds(span[3]), span[4] ? integer(span[4]) : "–"])).slice(0, 2000));
}
