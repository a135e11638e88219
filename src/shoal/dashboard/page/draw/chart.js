// A chart of one quantity as a card: its lines, its values in words and as a table, and its files.
import { button, dim, el, replace, table } from "../dom.js";
import { elapsed, exact, integer, inUnit, number } from "../format.js";
import { t } from "../words.js";
import { lineColour, nearest, Plot } from "./plot.js";
import { saveCsv, savePng, saveSvg } from "./save.js";

/** The exponential mean, without its pull towards the first value. */
export function smoothed(values, weight) {
	let sum = 0, total = 0;
	return values.map((value) => {
		if (value == null) return value;
		sum = weight * sum + (1 - weight) * value;
		total = weight * total + (1 - weight);
		return sum / total;
	});
}

function lastPlace(values) {
	for (let place = values.length - 1; place >= 0; place--) if (values[place] !== null) return place;
	return -1;
}

const xText = (value, x) => (x === "time" ? elapsed(value) : integer(value));
const precise = (value, unit) => (unit === "bytes" || unit === "s" ? inUnit(value, unit) : number(value, 8));

export class Chart {
	/** `onzoom(from, to)` is asked for another range, both null for all. */
	constructor({ title, unit = "", height = 190, group = title, onzoom = () => {} }) {
		Object.assign(this, { title, unit, height, onzoom, tables: [], lines: [], cursor: null });
		this.readout = el("p.readout");
		this.spoken = el("p.unseen", { role: "status" });
		this.place = el("div.plot", { tabindex: 0, role: "group", onkeydown: (event) => this.key(event) });
		this.table = el("div");
		const items = [["SVG", saveSvg], ["PNG", savePng], ["CSV", saveCsv], [t("table"), () => this.tabulate()]];
		const menu = el("details.menu", el("summary", { "aria-label": t("save.of", { title }), title: t("save") }, "⤓"),
			el("div.items", items.map(([name, save]) => button(name, () => { menu.open = false; save(this); }))));
		menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
		this.node = el("section.card.chart", { "aria-label": title, "data-curve": title },
			el("div.cardhead", el("h2", title, unit ? el("span.unit", ` ${unit}`) : null), menu),
			this.readout, this.place, this.spoken, this.table);
		this.plot = new Plot(this.place, { height, group, hovered: (x) => { this.cursor = x; this.say(); }, zoomed: onzoom });
	}

	/** Draw `tables` ({label, place, x, min, max, mean, bad}); `settings` are x, log, smooth, ticks, range. */
	show(tables, settings) {
		Object.assign(this, { tables }, settings);
		this.lines = tables.map((one) => ({ ...one, smooth: this.smooth ? smoothed(one.mean, this.smooth) : null }));
		this.plot.show(this.lines, this);
		const first = tables[0];
		this.place.setAttribute("aria-label", first?.x.length ? t("chart.says", { title: this.title, points: first.x.length, runs: tables.length, last: inUnit(first.mean[lastPlace(first.mean)], this.unit) }) : `${this.title}: ${t("no.points")}`);
		this.say();
		if (this.table.firstChild) this.tabulate(true);
	}

	end() { this.plot.end(); }

	/** The values at the cursor, or the last ones. */
	say() {
		const at = this.cursor;
		const first = this.lines[0];
		if (!first?.x.length) { replace(this.readout, dim(t("no.points"))); return; }
		const x = at === null ? null : first.x[nearest(first.x, at)];
		const near = (this.ticks ?? []).filter((one) => at !== null && Math.abs(this.plot.leftOf(one.x) - this.plot.leftOf(x)) < 5);
		replace(this.readout, el("span.at", x === null ? t("last") : xText(x, this.x)), this.lines.map((one) => {
			const place = at === null ? lastPlace(one.mean) : nearest(one.x, x);
			const name = this.lines.length > 1 ? [el("span.key!", { style: { background: lineColour(one.place) } }), dim(one.label), " "] : null;
			const [low, high, mean, smooth, bad] = ["min", "max", "mean", "smooth", "bad"].map((column) => one[column]?.[place] ?? null);
			if (mean === null && !bad) return null;
			return el("span", name, mean === null ? null : el("b", { title: exact(mean), "data-x": exact(one.x[place]), "data-value": exact(mean) }, at === null ? inUnit(mean, this.unit) : precise(mean, this.unit)),
				low !== high && at !== null ? dim(` ${inUnit(low, this.unit)} … ${inUnit(high, this.unit)}`) : null,
				smooth === null ? null : dim(` ≈ ${inUnit(smooth, this.unit)}`),
				bad ? el("b.badtext", ` ${t("not.finite", { count: bad })}`) : null);
		}), near.map((one) => dim(one.text)));
	}

	key(event) {
		const xs = this.lines[0]?.x ?? [];
		if (!xs.length || !this.plot.scale) return;
		const { low, high } = this.plot.scale;
		const at = this.cursor === null ? xs.length - 1 : nearest(xs, this.cursor);
		const step = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
		const move = { ArrowLeft: -step, ArrowRight: step }[event.key];
		if (move) {
			this.plot.point(xs[Math.max(0, Math.min(xs.length - 1, at + move))]);
			this.spoken.textContent = this.readout.textContent;
		} else if (event.key === "+" || event.key === "=") this.onzoom(Math.max(low, xs[at] - (high - low) / 4), Math.min(high, xs[at] + (high - low) / 4));
		else if (event.key === "-") this.onzoom(low - (high - low) / 2, high + (high - low) / 2);
		else if (event.key === "0" || (event.key === "Escape" && this.range)) this.onzoom(null, null);
		else return;
		event.preventDefault();
		event.stopPropagation();
	}

	/** The points that are drawn, as a table; asked for again it goes. */
	tabulate(isAgain) {
		if (this.table.firstChild && !isAgain) { replace(this.table); return; }
		const rows = this.tables.flatMap((one) => one.x.map((x, place) => [xText(x, this.x), one.label, exact(one.mean[place]), exact(one.min[place]), exact(one.max[place]), integer(one.bad?.[place] ?? 0)]));
		const columns = [[t(`x.${this.x}`), true], [t("column.name")], [t("mean"), true], [t("min"), true], [t("max"), true], [t("bad"), true]].map(([text, isNumber]) => ({ text, number: isNumber }));
		replace(this.table, table(this.title, columns, rows.slice(-2000)));
	}
}
