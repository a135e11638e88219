// The ranks beside each other: who is slow and since when, who waits for whom, memory, places on hosts, and traffic.
import { asTable, card, column, dim, el, empty, replace, segments, table } from "../dom.js";
import { bytes, integer, number, percent, seconds } from "../format.js";
import { Heat, heatColour, median } from "../draw/heat.js";
import { get, liveRanks } from "../net.js";
import { has, t } from "../words.js";

const PARTS = { weights: "line-0", gradients: "line-2", optimizer: "line-5", activations: "line-1", other: "line-9" };
// Over the median of all ranks in these steps, over that of the run, or as a share of the step.
const MEASURES = { busy: "window", step: "run", wait: "share", data: "share" };
const RATIO = [0.7, 1.3];
const SHARE = 0.5;

function ratios(answer, measure) {
	const values = answer[measure] ?? [];
	if (MEASURES[measure] === "share") return values.map((row, rank) => row.map((one, bin) => divide(one, answer.step?.[rank]?.[bin])));
	const all = median(values.flat());
	const medians = (answer.bins ?? []).map((_, bin) => (MEASURES[measure] === "run" ? all : median(values.map((row) => row[bin]))));
	return values.map((row) => row.map((one, bin) => divide(one, medians[bin])));
}

const divide = (one, other) => (one == null || !other ? null : one / other);
const levelOf = (measure, ratio) => (ratio === null ? null : MEASURES[measure] === "share" ? 0.5 + ratio / SHARE / 2 : (ratio - RATIO[0]) / (RATIO[1] - RATIO[0]));

export function ranks(app, run) {
	const node = el("div.ranks", el("p.loading", t("loading")));
	const readout = el("p.readout", { role: "status" });
	const legend = el("span.scale");
	let answer = null, measure = "busy", heat = null, isDirty = false, loadedAt = 0;

	async function load() {
		loadedAt = Date.now();
		isDirty = false;
		answer = await get(`run/${run.id}/ranks`, { bins: 120 });
		draw();
	}

	function draw() {
		heat?.end();
		heat = null;
		const hasTimes = answer.ranks?.length && answer.bins?.length;
		replace(node,
			hasTimes ? heatCard() : el("section.card", empty(t("no.steps"))),
			answer.scores?.length ? scores(answer) : null,
			el("div.pair", answer.mesh?.places?.length ? mesh(answer.mesh, run) : null, answer.memory?.length ? memory(answer.memory) : null),
			answer.traffic?.length ? traffic(answer.traffic) : null);
		if (hasTimes) paint();
	}

	function heatCard() {
		heat = new Heat({ title: t("heat.says", { ranks: answer.ranks.length }), onhover: hover });
		const chooser = segments(t("measure"), Object.keys(MEASURES).filter((one) => answer[one]).map((one) => [one, t(`measure.${one}`)]), measure, (value) => { measure = value; paint(); });
		return card(t("heat"), chooser, el("div.heathead", readout, legend), heat.node, asTable(t("as.table"), heatTable));
	}

	function paint() {
		heat.show({ levels: ratios(answer, measure).map((row) => row.map((one) => levelOf(measure, one))), ranks: answer.ranks, bins: answer.bins });
		const isShare = MEASURES[measure] === "share";
		replace(legend, el("span", isShare ? "0%" : `${RATIO[0]} ×`), el("span.ramp!", { style: { background: `linear-gradient(to right, ${[isShare ? 0.5 : 0, isShare ? 0.75 : 0.5, 1].map(heatColour).join(",")})` } }),
			el("span", isShare ? percent(SHARE, 0) : `${RATIO[1]} ×`), dim(t(`over.${MEASURES[measure]}`)));
		hover(null);
	}

	function hover(at) {
		if (!at) { replace(readout, dim(t("heat.hint"))); return; }
		const [row, bin] = at;
		const ratio = ratios(answer, measure)[row][bin];
		const [first, last] = answer.bins[bin];
		replace(readout, el("span.at", `${t("rank", { rank: answer.ranks[row] })} · ${first === last ? t("step.of", { step: integer(first) }) : t("steps.of", { first: integer(first), last: integer(last) })}`),
			el("b", { "data-value": String(answer[measure][row][bin]) }, seconds(answer[measure][row][bin])), dim(ratio === null ? "" : MEASURES[measure] === "share" ? percent(ratio) : `${number(ratio, 3)} ×`));
	}

	function heatTable() {
		const kinds = Object.keys(MEASURES).filter((one) => answer[one]);
		return table(t("heat"), [column("column.rank", true), ...kinds.map((one) => ({ text: t(`measure.${one}`), number: true }))],
			answer.ranks.map((rank, row) => [String(rank), ...kinds.map((one) => seconds(mean(answer[one][row] ?? [])))]));
	}

	load().catch((error) => replace(node, empty(t("no.steps"), error.message)));
	return {
		node,
		end: () => heat?.end(),
		again: load,
		header(header) { run = header; const place = node.querySelector(".mesh"); if (place && answer?.mesh) place.replaceWith(mesh(answer.mesh, run)); },
		points() { isDirty = true; },
		changed() { isDirty = true; },
		tick() { if (isDirty && Date.now() - loadedAt > 5000 && !node.matches(":hover") && !node.contains(document.activeElement)) load().catch(() => {}); },
	};
}

function mean(values) {
	const known = values.filter((one) => one !== null && Number.isFinite(one));
	return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
}

const signed = (share) => `${share > 0 ? "+" : ""}${percent(share)}`;

function meter(share, kind) {
	return el("span!", { class: `meter ${kind}` }, el("span", { style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } }));
}

/** The busiest first, as the server has them: 1 is as busy as the others are. */
function scores(answer) {
	const { waits = [], phases = [] } = answer;
	const most = Math.max(...answer.scores.map((one) => one.score ?? 0), 1);
	const columns = [column("column.rank", true), column("busy", true), column("score", true), { text: "" }, column("against.own", true), ...waits.map((axis) => ({ text: t("waits.on", { axis }), number: true }))];
	const rows = answer.scores.slice(0, 64).map((one) => {
		const isSlow = one.score > 1.1;
		const place = answer.ranks.indexOf(one.rank);
		const parts = phases.map((phase, which) => [phase, answer.phase_seconds?.[place]?.[which] ?? 0, `line-${which % 10}`]);
		return [el("span", isSlow ? el("span.badtext", "▲ ") : null, String(one.rank)), seconds(one.busy_seconds), el("span", { "data-value": one.score }, `${number(one.score, 3)} ×`),
			phases.length ? stack(parts, Math.max(...parts.map(([, value]) => value), parts.reduce((sum, [, value]) => sum + value, 0)), seconds) : meter((one.score ?? 0) / most, isSlow ? "bad" : "good"),
			`${number(one.against_own, 3)} ×`, ...waits.map((_, which) => seconds(answer.wait_seconds[place]?.[which]))];
	});
	return card(t("scores"), null, el("p.dim", t("scores.why")), phases.length ? legend(phases.map((phase, which) => [phase, `line-${which % 10}`])) : null, table(t("scores"), columns, rows, { "data-table": "scores" }));
}

const swatch = (name) => el("span.swatch!", { style: { background: `var(--${name})` } });
const legend = (entries) => el("ul.legend", entries.map(([text, name]) => el("li", swatch(name), text)));

/** Parts [text, value, colour] in one bar. */
function stack(parts, most, show, kind = "") {
	const known = parts.filter(([, value]) => value);
	return el("div", { class: `stack ${kind}`, role: "img", "aria-label": known.map(([text, value]) => `${text} ${show(value)}`).join(", ") },
		known.map(([text, value, name]) => el("span", { title: `${text} ${show(value)}`, style: { width: `${(value / most) * 100}%`, background: `var(--${name})` } })));
}

function mesh({ axes, places }, run) {
	const hosts = new Map();
	const live = new Map(liveRanks(run.live).map((one) => [one.rank, one]));
	for (const one of places) hosts.set(one.host ?? "", [...(hosts.get(one.host ?? "") ?? []), one]);
	const hang = run.live?.hang?.rank;
	const place = (one) => {
		const now = live.get(one.rank);
		const state = one.rank === hang ? "silent" : now?.state ?? one.state ?? "ended";
		const where = Object.entries(one.coordinates ?? {}).filter(([axis]) => (axes ?? []).some(([name, size]) => name === axis && size > 1));
		const text = where.map(([axis, index]) => `${axis} ${index}`).join(" ");
		return el("li", { class: `place ${state}`, "data-rank": one.rank, title: now ? t("place.says", { phase: now.phase || "–", seconds: seconds(now.phase_seconds), age: seconds(now.heartbeat_age) }) : null },
			el("b", String(one.rank)), el("span", text), el("span.state", state === "running" && now?.phase ? now.phase : has(`status.${state}`) ? t(`status.${state}`) : state));
	};
	const shape = (axes ?? []).map(([name, size]) => `${name} ${size}`).join(" × ");
	const node = card(t("mesh"), el("span.dim.mono", shape), el("div.hosts", [...hosts].map(([host, members]) =>
		el("section.host", { "aria-label": host }, el("h3", host || t("this.host")), el("ul", members.map(place))))));
	node.classList.add("mesh");
	return node;
}

function memory(rows) {
	const total = (parts) => Object.keys(PARTS).reduce((sum, part) => sum + (parts?.[part] ?? 0), 0);
	const most = Math.max(...rows.flatMap((row) => [total(row.measured), total(row.predicted)]), 1);
	const bar = (parts, kind) => stack(Object.entries(PARTS).map(([part, name]) => [t(`part.${part}`), parts[part], name]), most, bytes, kind);
	const columns = [column("column.rank", true), column("measured.predicted"), column("measured", true), column("timeline.predicted", true), column("difference", true)];
	return card(t("memory"), legend(Object.entries(PARTS).filter(([part]) => rows.some((row) => row.measured?.[part] || row.predicted?.[part])).map(([part, name]) => [t(`part.${part}`), name])),
		table(t("memory"), columns, rows.map((row) => {
			const [had, said] = [row.measured ? total(row.measured) : null, row.predicted ? total(row.predicted) : null];
			return [String(row.rank), el("div.stacks", row.measured ? bar(row.measured, "measured") : null, row.predicted ? bar(row.predicted, "predicted") : null), bytes(had), bytes(said), had && said ? signed(had / said - 1) : "–"];
		}), { "data-table": "memory", class: "plain wide2" }));
}

function traffic(rows) {
	const most = Math.max(...rows.map((row) => row.bytes ?? 0), 1);
	const columns = [column("axis"), column("operation"), column("calls", true), column("bytes", true), { text: "" }, column("forecast", true), column("difference", true), column("time", true), column("per.second", true)];
	return card(t("traffic"), null, table(t("traffic"), columns, rows.map((row) => {
		const off = row.forecast_bytes ? row.bytes / row.forecast_bytes - 1 : null;
		return [row.axis, row.operation, integer(row.calls), el("span", { title: `${integer(row.bytes)} B`, "data-value": row.bytes }, bytes(row.bytes)), meter((row.bytes ?? 0) / most, "plain"), bytes(row.forecast_bytes), off === null ? "–" : off === 0 ? t("exactly") : signed(off), seconds(row.seconds), row.seconds ? `${bytes(row.bytes / row.seconds)}/s` : "–"];
	}), { "data-table": "traffic" }));
}
