// Charts of one run or of several, with one x axis: how they are asked for, zoomed, smoothed and kept up to date.
import { button, dim, el, replace, segments, select } from "../dom.js";
import { recall, remember } from "../kept.js";
import { get } from "../net.js";
import { has, t } from "../words.js";
import { Chart } from "../draw/chart.js";
import { dashOf, lineColour } from "../draw/plot.js";

// What one looks at first, in this order; the rest is asked for when somebody wants it.
const FIRST = ["loss", "validation_loss", "validation_accuracy", "learning_rate", "gradient_norm", "tokens_per_s", "step_seconds", "memory", "staleness", "islands_distance"];

/** The words for a curve: its own, or for `wait:dp` and `phase:forward` those of the kind with the rest. */
export function curveTitle(name) {
	const [kind, rest] = name.split(/:(.*)/);
	return has(`curve.${name}`) ? t(`curve.${name}`) : rest && has(`curve.${kind}`) ? t(`curve.${kind}`, { name: rest }) : name.replaceAll("_", " ");
}

function rank(name) {
	const place = FIRST.indexOf(name);
	return place >= 0 ? place : name.startsWith("log:") || /^(validation|test)_/.test(name) ? FIRST.length : Infinity;
}

/** `runs` are [{id, label}], `curves` are [{name, unit, ranks}]; `ranks` those that may be chosen. */
export function wall(app, { runs, curves, ranks = [], query = new URLSearchParams(), onquery = () => {}, height }) {
	const state = { x: query.get("x") ?? recall("x") ?? "step", log: (query.get("log") ?? recall("log")) === "1", smooth: Number(query.get("smooth") ?? recall("smooth") ?? 0),
		from: query.has("from") ? Number(query.get("from")) : null, to: query.has("to") ? Number(query.get("to")) : null, rank: "" };
	const places = new Map(runs.map((one, place) => [one.id, place]));
	const sorted = curves.map((curve) => [rank(curve.name), curve]).sort(([one], [other]) => (one === other ? 0 : one - other));
	const later = sorted.filter(([place]) => place === Infinity).map(([, curve]) => curve);
	const make = (curve) => ({ curve, tables: new Map(), ticks: [], chart: new Chart({ title: curveTitle(curve.name), unit: curve.unit ?? "", height, group: `wall-${runs.map((one) => one.id).join()}`, onzoom: zoom }) });
	const charts = sorted.filter(([place]) => place < Infinity || sorted.length === 1).map(([, curve]) => make(curve));
	const zoomed = el("span");
	let asked = null, isDirty = false, loadedAt = 0, appended = 0;

	function keep(key, value) { state[key] = value; remember(key, value === true ? "1" : value === false ? "0" : String(value)); tell(); }

	function tell() {
		onquery(Object.fromEntries([["x", state.x === "step" ? null : state.x], ["log", state.log ? 1 : null], ["smooth", state.smooth || null], ["from", state.from], ["to", state.to]].filter(([, value]) => value !== null)));
		replace(zoomed, state.from !== null ? button(t("zoom.all"), () => zoom(null, null), { class: "primary", id: "zoom-all" }) : null);
	}

	function zoom(from, to) {
		[state.from, state.to] = [from, to];
		tell();
		draw();
		load();
	}

	async function load() {
		asked?.abort();
		const { signal } = asked = new AbortController();
		[isDirty, loadedAt, appended] = [false, Date.now(), 0];
		await Promise.all(charts.map((one) => ask(one, signal)));
	}

	function ask(one, signal) {
		return Promise.all(runs.map(async ({ id }) => {
			try {
				const answer = await get(`run/${id}/curve`, { name: one.curve.name, x: state.x, from: state.from, to: state.to, points: 800, rank: one.curve.ranks ? state.rank : "" }, signal);
				one.tables.set(id, answer);
				if (runs.length === 1) one.ticks = answer.ticks ?? [];
				drawOne(one);
			} catch (error) {
				if (error.name === "AbortError" || signal.aborted) return;
				if (error.status !== 404) app.note(`${one.chart.title}: ${error.message}`);
				one.tables.delete(id);
				drawOne(one);
			}
		}));
	}

	function drawOne(one) {
		const tables = runs.filter(({ id }) => one.tables.has(id)).map(({ id, label }) => ({ label, place: places.get(id), ...one.tables.get(id) }));
		one.chart.show(tables, { x: state.x, log: state.log, smooth: state.smooth, ticks: one.ticks, range: state.from === null ? null : [state.from, state.to] });
	}

	function draw() { for (const one of charts) drawOne(one); }

	const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, id: "smooth", oninput: () => {
		keep("smooth", Number(slider.value));
		amount.textContent = state.smooth ? state.smooth.toFixed(2) : t("off");
		draw();
	} });
	const amount = el("output", { for: "smooth" }, state.smooth ? state.smooth.toFixed(2) : t("off"));
	const log = el("input", { type: "checkbox", id: "log", checked: state.log, onchange: () => { keep("log", log.checked); draw(); } });
	const tools = el("div.bar-tools", {},
		segments(t("x"), ["step", "samples", "tokens", "time"].map((one) => [one, t(`x.${one}`)]), state.x, (value) => {
			[state.from, state.to] = [null, null];
			keep("x", value);
			load();
		}),
		el("label.inline", log, t("log_scale")),
		el("label.inline", t("smooth"), slider, amount),
		ranks.length > 1 ? select(t("column.rank"), [["", t("rank.all")], ...ranks.map((one) => [one, t("rank", { rank: one })])], "", (value) => { state.rank = value; load(); }) : null,
		el("span.room"), zoomed, el("span.dim.hint", t("zoom.hint")));
	const legend = runs.length > 1 ? el("ul.legend", runs.map(({ id, label }, place) => el("li", stroke(place), el("a", { href: `#/run/${id}/curves` }, label)))) : null;
	const grid = el("div", { class: charts.length > 1 ? "charts" : "charts one" }, charts.map((one) => one.chart.node));
	const rest = later.length && sorted.length > 1 ? button(t("more.curves", { count: later.length }), () => {
		const fresh = later.map(make);
		charts.push(...fresh);
		grid.append(...fresh.map((one) => one.chart.node));
		rest.remove();
		for (const one of fresh) ask(one, asked.signal);
	}, { id: "more-curves" }) : null;
	tell();
	load();

	return {
		node: el("div.wall", tools, legend, grid, el("p.after", rest)),
		charts,
		end() { asked?.abort(); for (const one of charts) one.chart.end(); },
		again: load,
		/** New points of a run: drawn at once where the axis is the step, and asked for anew now and then. */
		points({ id, curves: news, reset }) {
			if (!places.has(id)) return;
			isDirty = true;
			if (reset) { load(); return; }
			if (state.x !== "step" || state.from !== null || state.rank !== "") return;
			for (const one of charts) {
				const table = one.tables.get(id);
				const fresh = news?.[one.curve.name] ?? [];
				if (!table || !fresh.length) continue;
				// A restart takes back what came after its checkpoint.
				while (table.x.length && table.x.at(-1) >= fresh[0][0]) for (const column of ["x", "min", "max", "mean", "bad"]) table[column].pop();
				for (const [x, y] of fresh) {
					const isFinite = y !== null && Number.isFinite(y);
					for (const column of ["min", "max", "mean"]) table[column].push(isFinite ? y : null);
					table.x.push(x);
					table.bad.push(isFinite ? 0 : 1);
					appended += 1;
				}
				drawOne(one);
			}
		},
		tick() {
			const wait = appended > 2000 || state.x !== "step" ? 3 : 10;
			if (isDirty && state.from === null && Date.now() - loadedAt > wait * 1000) load();
		},
		changed() { isDirty = true; },
	};
}

/** A run's line in a legend: its colour and its dashes. */
export function stroke(place) {
	const canvas = el("canvas!", { width: 48, height: 8, class: "stroke" });
	const context = canvas.getContext("2d");
	context.strokeStyle = lineColour(place);
	context.lineWidth = 4;
	context.setLineDash(dashOf(place).map((one) => one * 2));
	context.beginPath();
	context.moveTo(0, 4);
	context.lineTo(48, 4);
	context.stroke();
	return canvas;
}
