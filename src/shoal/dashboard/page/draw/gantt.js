// Spans of ranks on one axis of time, on a canvas: a strip of phases, the cells, and below them what crosses between ranks.
import { arrow, colour, el, fit, whenSized } from "../dom.js";
import { ticks } from "./axes.js";

const ROW = 34;
const LEFT = 58;
const FOOT = 20;

/** What a cell such as `2F0` names: stage, kind and microbatch; null where it is none. */
export function cellOf(name) {
	// Of cells that are computed at once, the first.
	const found = /^(\d+)([A-Z_]+)(\d+)?(\+|$)/.exec(name);
	return found ? { stage: Number(found[1]), kind: found[2], microbatch: found[3] === undefined ? null : Number(found[3]) } : null;
}

export function kindOf([kind, name]) {
	if (kind === "cell") return { F: "forward", W: "weight" }[cellOf(name)?.kind] ?? (cellOf(name) ? "backward" : "other");
	if (kind === "comm" || kind === "data" || kind === "wait") return kind;
	return /^(for|back)ward$|^optimizer$|^checkpoint$/.test(name) ? name : { take: "wait", pull: "comm", push: "comm", gradients: "comm", islands: "comm" }[name] ?? "other";
}

/** Dark or white, whichever is read better on a colour. */
function inkOn(fill) {
	const [red, green, blue] = fill.match(/[\d.]+/g).map(Number);
	return red * 0.3 + green * 0.59 + blue * 0.11 > 128 ? "#0b1c28" : "#fff";
}

export class Gantt {
	/** `rows` are [{label, spans}]; `onpick(row, place)` hears of a click, `onrange(from, to)` of a drag. */
	constructor({ title, onpick, onrange }) {
		Object.assign(this, { rows: [], range: [0, 1], picked: null });
		this.canvas = el("canvas!");
		this.node = el("div.gantt", { tabindex: 0, role: "group", "aria-label": title });
		this.node.append(this.canvas);
		this.unwatch = whenSized(this.node, (width) => { this.width = width; this.draw(); });
		let from = null;
		const at = (event) => { const box = this.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
		this.canvas.addEventListener("pointerdown", (event) => { from = at(event)[0]; this.canvas.setPointerCapture(event.pointerId); });
		this.canvas.addEventListener("pointermove", (event) => {
			const [x, y] = at(event);
			if (from !== null && Math.abs(x - from) > 5) { this.dragged = [Math.min(from, x), Math.max(from, x)]; this.draw(); }
			const hit = this.hit(x, y);
			this.canvas.title = hit ? this.rows[hit[0]].spans[hit[1]][1] : "";
			this.canvas.style.cursor = hit ? "pointer" : "crosshair";
		});
		this.canvas.addEventListener("pointerup", (event) => {
			const [x, y] = at(event);
			if (this.dragged) onrange(this.timeAt(this.dragged[0]), this.timeAt(this.dragged[1]));
			else { const hit = this.hit(x, y); if (hit) onpick(this, ...hit); }
			[from, this.dragged] = [null, null];
			this.draw();
		});
		this.canvas.addEventListener("dblclick", () => onrange(null, null));
		this.node.addEventListener("keydown", (event) => {
			const next = arrow(event, this.picked ?? [0, -1]);
			if (!next) return;
			const there = Math.max(0, Math.min(this.rows.length - 1, next[0]));
			const last = (this.rows[there]?.spans.length ?? 0) - 1;
			if (last >= 0) onpick(this, there, Math.max(0, Math.min(last, next[1])));
		});
	}

	end() { this.unwatch(); }

	show(rows, range) {
		Object.assign(this, { rows, range });
		this.hasCells = rows.some((row) => row.spans.some(([kind]) => kind === "cell"));
		this.draw();
	}

	pick(picked) { this.picked = picked; this.draw(); }

	xOf(time) { return LEFT + ((time - this.range[0]) / (this.range[1] - this.range[0] || 1)) * (this.width - LEFT - 8); }

	timeAt(x) { return this.range[0] + ((x - LEFT) / (this.width - LEFT - 8)) * (this.range[1] - this.range[0]); }

	/** Top and height of a span inside its row. */
	band(kind) {
		if (kind === "comm" || kind === "data" || kind === "wait") return [22, 8];
		if (kind === "phase" && this.hasCells) return [1, 3];
		return [5, 16];
	}

	hit(x, y) {
		const row = Math.floor(y / ROW);
		const spans = this.rows[row]?.spans;
		if (!spans || x < LEFT) return null;
		const inRow = y - row * ROW;
		for (let place = spans.length - 1; place >= 0; place--) {
			const [kind, , start, long] = spans[place];
			const [top, high] = this.band(kind);
			if (inRow >= top - 2 && inRow <= top + high + 2 && x >= this.xOf(start) - 1 && x <= Math.max(this.xOf(start + long), this.xOf(start) + 3)) return [row, place];
		}
		return null;
	}

	draw() {
		if (!this.width || !this.rows.length) return;
		const height = this.rows.length * ROW + FOOT;
		const context = fit(this.canvas, this.width, height);
		const right = this.width - 8;
		context.font = "11px system-ui, sans-serif";
		context.textBaseline = "middle";
		this.axis(context, height, right);
		this.rows.forEach((row, place) => {
			const top = place * ROW;
			context.fillStyle = colour("dim");
			context.textAlign = "right";
			context.fillText(row.label, LEFT - 10, top + 14);
			context.save();
			context.beginPath();
			context.rect(LEFT, top, right - LEFT, ROW);
			context.clip();
			row.spans.forEach((span, which) => this.span(context, span, top, this.picked?.[0] === place && this.picked[1] === which));
			context.restore();
		});
		if (this.dragged) {
			context.fillStyle = colour("veil");
			context.fillRect(this.dragged[0], 0, this.dragged[1] - this.dragged[0], height - FOOT);
		}
	}

	axis(context, height, right) {
		context.textAlign = "center";
		for (const time of ticks(...this.range, Math.max(2, Math.floor((right - LEFT) / 90)))) {
			const x = Math.round(this.xOf(time)) + 0.5;
			context.strokeStyle = colour("grid");
			context.beginPath();
			context.moveTo(x, 0);
			context.lineTo(x, height - FOOT);
			context.stroke();
			context.fillStyle = colour("dim");
			context.fillText(this.range[1] > 3 ? `${time} s` : `${Number((time * 1000).toPrecision(6))} ms`, Math.max(LEFT + 14, Math.min(x, right - 18)), height - FOOT / 2 + 2);
		}
	}

	span(context, span, rowTop, isPicked) {
		const [kind, name, start, long] = span;
		const [inset, high] = this.band(kind);
		const x = this.xOf(start);
		const wide = Math.max(1, this.xOf(start + long) - x - 0.75);
		const top = rowTop + inset;
		const look = kindOf(span);
		context.fillStyle = colour(`k-${look}`);
		context.fillRect(x, top, wide, high);
		// What waits or crosses has stripes, so that it is told from work without its colour.
		if ((look === "comm" || look === "wait") && wide > 3) {
			context.save();
			context.beginPath();
			context.rect(x, top, wide, high);
			context.clip();
			context.strokeStyle = colour("surface");
			context.lineWidth = 1;
			context.beginPath();
			const end = Math.min(x + wide, this.width);
			for (let at = Math.max(x, LEFT) - high; at < end; at += 5) { context.moveTo(at, top + high); context.lineTo(at + high, top); }
			context.stroke();
			context.restore();
		}
		// The stage may be left out where there is no room: the row says it.
		const text = high < 12 ? null : [name, name.replace(/^\d+(?=[A-Z])/, "")].find((one) => wide > context.measureText(one).width + 3);
		if (text) {
			context.fillStyle = inkOn(colour(`k-${look}`));
			context.textAlign = "center";
			context.fillText(text, x + wide / 2, top + high / 2 + 0.5);
		}
		if (isPicked) {
			context.strokeStyle = colour("text");
			context.lineWidth = 2;
			context.strokeRect(x + 1, top - 1, Math.max(2, wide - 2), high + 2);
		}
	}
}
