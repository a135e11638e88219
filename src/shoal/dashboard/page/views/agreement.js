// How replicas and parameter servers agree: staleness, who took part, deaths, rounds of islands, compression, caches.
import { card, column, el, empty, replace, table } from "../dom.js";
import { any, bytes, clock, integer, number, percent, seconds } from "../format.js";
import { get } from "../net.js";
import { t } from "../words.js";
import { Chart } from "../draw/chart.js";

export function agreement(app, run) {
	const node = el("div.agreement", el("p.loading", t("loading")));
	let charts = [], isDirty = false, loadedAt = 0;

	async function load() {
		[loadedAt, isDirty] = [Date.now(), false];
		const answer = await get(`run/${run.id}/agreement`);
		for (const one of charts) one.end();
		charts = [];
		const { rounds } = answer;
		const cards = [answer.staleness && staleness(answer.staleness), line("agree.distance", rounds, "distance"), line("agree.measured", rounds?.measured, "distance"), line("agree.round_seconds", rounds, "seconds"),
			rowsOf("agree.views", answer.views, VIEWS), rowsOf("agree.deaths", answer.deaths, DEATHS), answer.compression && compression(answer.compression),
			rowsOf("agree.traffic", answer.traffic, TRAFFIC), rowsOf("agree.dropped", answer.dropped, DROPPED), rowsOf("agree.cache", answer.cache, CACHE)].filter(Boolean);
		replace(node, cards.length ? el("div.charts", cards) : empty(t("no.agreement"), t("no.agreement.hint")));
	}

	function line(key, values, name) {
		const known = (values?.step ?? []).map((x, place) => [x, values[name][place]]).filter(([, y]) => y !== null);
		if (!known.length) return null;
		const chart = new Chart({ title: t(key), unit: name === "seconds" ? "s" : "" });
		charts.push(chart);
		const [x, y] = [0, 1].map((which) => known.map((one) => one[which]));
		chart.show([{ label: run.name, place: 0, x, min: y, max: y, mean: y }], { x: "step" });
		return chart.node;
	}

	load().catch((error) => replace(node, empty(t("no.agreement"), error.message)));
	return { node, end() { for (const one of charts) one.end(); }, again: load, points() { isDirty = true; }, changed() { isDirty = true; },
		tick() { if (isDirty && Date.now() - loadedAt > 5000) load().catch(() => {}); } };
}

// A column: its word, its text, whether it is a number.
const VIEWS = [["time", (one) => clock(one.t)], ["epoch", (one) => integer(one.epoch), true], ["members", (one) => one.members.join(" ") || `${integer(one.replicas)} / ${integer(one.logical)}`], ["cause", (one) => one.cause]];
const DEATHS = [["time", (one) => clock(one.t)], ["detail.what", (one) => one.kind.replaceAll("_", " ")], ["detail.where", (one) => [one.who, one.host, one.phase].filter(Boolean).join(" · ")], ["column.step", (one) => integer(one.step), true],
	["cause", (one) => [one.cause, one.seconds == null ? null : seconds(one.seconds)].filter(Boolean).join(", ")]];
const TRAFFIC = [["process", (one) => one.who], ["agree.pushed", (one) => bytes(one.pushed_bytes), true], ["agree.pulled", (one) => bytes(one.pulled_bytes), true], ["agree.residual", (one) => bytes(one.residual_bytes), true]];
const DROPPED = [["process", (one) => one.process], ["cause", (one) => Object.entries(one.counts).map(([reason, count]) => `${reason} ${integer(count)}`).join(", ")]];
const CACHE = [["column.rank", (one) => any(one.rank), true], ["agree.hits", (one) => percent(one.hit_rate), true], ["agree.fetches", (one) => integer(one.fetches), true], ["bytes", (one) => bytes(one.fetched_bytes), true],
	["time", (one) => seconds(one.fetch_seconds), true], ["measure.wait", (one) => seconds(one.wait_seconds), true]];

function rowsOf(key, rows, columns) {
	return rows?.length ? card(t(key), null, table(t(key), columns.map(([word, , isNumber]) => column(word, isNumber)), rows.map((row) => columns.map(([, show]) => show(row))), { "data-table": key })) : null;
}

/** A histogram for each worker. */
function staleness({ bins, workers }) {
	const most = Math.max(1, ...workers.flatMap((one) => one.counts));
	return card(t("agree.staleness"), null, el("p.dim", t("agree.staleness.why")), table(t("agree.staleness"),
		[column("process"), ...bins.map(([first, last]) => ({ text: first === last ? String(first) : `${first}–${last}`, number: true })), column("mean", true)],
		workers.map((one) => [one.worker, ...one.counts.map((count) => el("span.column", el("span.up", { "aria-hidden": "true", style: { height: `${(count / most) * 30}px` } }), integer(count))), number(one.mean, 3)]), { "data-table": "staleness" }));
}

function compression(one) {
	const facts = [["agree.codec", one.codec], ["agree.ratio", one.sent_bytes && one.dense_bytes ? `${number(one.dense_bytes / one.sent_bytes, 4)} ×` : "–"], ["agree.pushed", bytes(one.sent_bytes)], ["agree.dense", bytes(one.dense_bytes)], ["agree.residual", bytes(one.residual_bytes)]];
	return card(t("agree.compression"), null, el("dl.facts", facts.map(([key, value]) => el("div", el("dt", t(key)), el("dd", value)))));
}
