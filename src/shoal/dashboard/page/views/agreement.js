// How replicas and parameter servers agree: staleness, who took part, deaths, rounds of islands, compression, caches.
import { card, column, el, empty, replace, table } from "../dom.js";
import { any, bytes, clock, integer, number, percent, seconds } from "../format.js";
import { get } from "../net.js";
import { t } from "../words.js";
import { Chart } from "../draw/chart.js";
import { Gantt } from "../draw/gantt.js";

export function agreement(app, run) {
	const node = el("div.agreement", el("p.loading", t("loading")));
	let charts = [], isDirty = false, loadedAt = 0;

	async function load() {
		[loadedAt, isDirty] = [Date.now(), false];
		const answer = await get(`run/${run.id}/agreement`);
		for (const one of charts) one.end();
		charts = [];
		const { queues, exchange, rounds, presence } = answer;
		const cards = [answer.staleness && staleness(answer.staleness), lines("queues", queues, "todo in_hand waiting unapplied", "time"), lines("ratio", exchange, "ratio"), lines("residual", exchange, "residual_norm"),
			lines("distance", rounds, "distance"), lines("measured", rounds?.measured, "distance"), lines("round_seconds", rounds, "seconds"), presence && life(presence), rowsOf("views"), rowsOf("deaths"),
			answer.compression && compression(answer.compression), rowsOf("traffic"), rowsOf("dropped"), rowsOf("cache")].filter(Boolean);
		replace(node, cards.length ? el("div.charts", cards) : empty(t("no.agreement"), t("no.agreement.hint")));

		function rowsOf(key) {
			const title = t(`agree.${key}`), columns = COLUMNS[key], rows = answer[key];
			return rows?.length ? card(title, null, table(title, columns.map(([word, , isNumber]) => column(word, isNumber)), rows.map((row) => columns.map(([, show]) => show(row))), { "data-table": key })) : null;
		}
	}

	function lines(key, values, names, x = "step") {
		names = names.split(" ");
		if (!names.some((name) => values?.[name].some((y) => y !== null))) return null;
		const chart = new Chart({ title: t(`agree.${key}`), unit: names[0] === "seconds" ? "s" : "" });
		charts.push(chart);
		chart.show(names.map((label, place) => { const y = values[label]; return { label, place, x: values[x], min: y, max: y, mean: y }; }), { x });
		return chart.node;
	}

	/** Who was there when. */
	function life({ rows, begin, end }) {
		const said = el("p.dim", { role: "status" });
		const gantt = new Gantt({ title: t("agree.views"), onpick(one, row, place) { one.pick([row, place]); const [, name, start, long] = rows[row].spans[place]; replace(said, `${rows[row].label} · ${name} · ${seconds(start)} – ${seconds(start + long)}`); },
			onrange(from, to) { gantt.show(rows, from === null ? [begin, end] : [from, to]); } });
		charts.push(gantt);
		gantt.show(rows, [begin, end]);
		return card(t("agree.views"), null, gantt.node, said);
	}

	load().catch((error) => replace(node, empty(t("no.agreement"), error.message)));
	return { node, end() { for (const one of charts) one.end(); }, again: load, points() { isDirty = true; }, changed() { isDirty = true; },
		tick() { if (isDirty && Date.now() - loadedAt > 5000 && !node.contains(document.activeElement)) load().catch(() => {}); } };
}

// A column: its word, its text, whether it is a number.
const COLUMNS = {
	views: [["time", (one) => clock(one.t)], ["epoch", (one) => integer(one.epoch), true], ["members", (one) => one.members.join(" ") || `${integer(one.replicas)} / ${integer(one.logical)}`], ["cause", (one) => one.cause]],
	deaths: [["time", (one) => clock(one.t)], ["detail.what", (one) => one.kind.replaceAll("_", " ")], ["detail.where", (one) => [one.who, one.host, one.phase].filter(Boolean).join(" · ")], ["column.step", (one) => integer(one.step), true],
		["cause", (one) => [one.cause, one.seconds == null ? null : seconds(one.seconds)].filter(Boolean).join(", ")]],
	traffic: [["process", (one) => one.who], ...["pushed", "pulled", "residual"].map((name) => [`agree.${name}`, (one) => bytes(one[`${name}_bytes`]), true])],
	dropped: [["process", (one) => one.process], ["cause", (one) => Object.entries(one.counts).map(([reason, count]) => `${reason} ${integer(count)}`).join(", ")]],
	cache: [["column.rank", (one) => any(one.rank), true], ["agree.hits", (one) => percent(one.hit_rate), true], ["agree.fetches", (one) => integer(one.fetches), true], ["bytes", (one) => bytes(one.fetched_bytes), true],
		["time", (one) => seconds(one.fetch_seconds), true], ["measure.wait", (one) => seconds(one.wait_seconds), true]],
};

/** A histogram for each worker. */
function staleness({ bins, workers }) {
	const most = Math.max(1, ...workers.flatMap((one) => one.counts));
	return card(t("agree.staleness"), null, el("p.dim", t("agree.staleness.why")), table(t("agree.staleness"),
		[column("process"), ...bins.map(([first, last]) => ({ text: first === last ? String(first) : `${first}–${last}`, number: true })), column("mean", true)],
		workers.map((one) => [one.worker, ...one.counts.map((count) => el("span.column", el("span.up!", { style: { height: `${(count / most) * 30}px` } }), integer(count))), number(one.mean, 3)]), { "data-table": "staleness" }));
}

function compression(one) {
	const facts = { codec: one.codec, ratio: one.sent_bytes && one.dense_bytes ? `${number(one.dense_bytes / one.sent_bytes, 4)} ×` : "–", pushed: bytes(one.sent_bytes), dense: bytes(one.dense_bytes), residual: bytes(one.residual_bytes) };
	return card(t("agree.compression"), null, el("dl.facts", Object.entries(facts).map(([key, value]) => el("div", el("dt", t(`agree.${key}`)), el("dd", value)))));
}
