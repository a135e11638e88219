// Lines with bands on a canvas: axes, marks, a cursor that charts of one group share, and a drag that asks for a range.
import { colour, el, fit, whenSized } from "../dom.js";
import { acrossTicks, upText, valueTicks } from "./axes.js";

const [LEFT, RIGHT, TOP, FOOT] = [60, 10, 10, 22];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5]];
const GLYPHS = { restart: "↻", failure: "✕", rollback: "↶", resumed: "↻", published: "▲" };
const groups = new Map();

export const lineColour = (place) => colour(`line-${place % 10}`);
export const dashOf = (place) => DASHES[Math.floor(place / 2) % DASHES.length];
const isKnown = (value) => value != null;

/** The place of the value of a sorted list that is nearest. */
export function nearest(values, wanted) {
	let [low, high] = [0, values.length - 1];
	while (high - low > 1) {
		const middle = (low + high) >> 1;
		if (values[middle] < wanted) low = middle; else high = middle;
	}
	return high >= 0 && Math.abs(values[high] - wanted) < Math.abs(values[low] - wanted) ? high : low;
}

export class Plot {
	/** `hovered(x or null)` hears of the cursor and `zoomed(from, to)` of a drag; `group` names the charts that share a cursor. */
	constructor(place, { height, group, hovered, zoomed }) {
		Object.assign(this, { place, height, group, hovered, zoomed, cursor: null, drag: null });
		this.under = el("canvas!");
		this.over = el("canvas.over!");
		place.append(this.under, this.over);
		this.unwatch = whenSized(place, (width) => { this.width = width; this.draw(); });
		if (!groups.has(group)) groups.set(group, new Set());
		groups.get(group).add(this);
		const at = (event) => Math.max(LEFT, Math.min(this.width - RIGHT, event.clientX - this.over.getBoundingClientRect().left));
		const end = (event) => {
			if (this.drag === null) return;
			const [from, to] = [this.drag, at(event)].sort((a, b) => a - b);
			this.drag = null;
			if (to - from > 5 && this.scale) zoomed(this.xAt(from), this.xAt(to)); else this.hover();
		};
		this.over.addEventListener("pointerdown", (event) => { if (event.button === 0) { this.drag = at(event); this.over.setPointerCapture(event.pointerId); } });
		this.over.addEventListener("pointermove", (event) => { this.dragged = at(event); if (this.scale) this.point(this.xAt(at(event))); });
		this.over.addEventListener("pointerup", end);
		this.over.addEventListener("pointercancel", () => { this.drag = null; });
		this.over.addEventListener("pointerleave", () => { if (this.drag === null) this.point(null); });
		this.over.addEventListener("dblclick", () => zoomed(null, null));
	}

	end() {
		this.unwatch();
		groups.get(this.group).delete(this);
		if (!groups.get(this.group).size) groups.delete(this.group);
	}

	/** `lines` are [{x, min, max, mean, smooth, bad, place}]. */
	show(lines, { x, log, ticks, range, unit }) {
		Object.assign(this, { lines, x, log, ticks, range, unit });
		this.draw();
	}

	xAt(left) { return this.scale.low + ((left - LEFT) / (this.width - LEFT - RIGHT)) * (this.scale.high - this.scale.low); }

	leftOf(x) { return LEFT + ((x - this.scale.low) / (this.scale.high - this.scale.low)) * (this.width - LEFT - RIGHT); }

	topOf(y) {
		const of = this.log ? Math.log10 : (value) => value;
		return this.height - FOOT - ((of(y) - of(this.scale.bottom)) / (of(this.scale.top) - of(this.scale.bottom))) * (this.height - FOOT - TOP);
	}

	/** What of the values is to be seen: all of them, or those in the range. */
	measure() {
		let [low, high, bottom, top] = [Infinity, -Infinity, Infinity, -Infinity];
		for (const one of this.lines) {
			one.x.forEach((x, place) => {
				if (this.range && (x < this.range[0] || x > this.range[1])) return;
				if (x < low) low = x;
				if (x > high) high = x;
				for (const y of [one.min[place], one.max[place]]) {
					if (!isKnown(y) || (this.log && y <= 0)) continue;
					if (y < bottom) bottom = y;
					if (y > top) top = y;
				}
			});
		}
		if (this.range) [low, high] = this.range;
		if (!(low <= high)) return null;
		if (low === high) [low, high] = [low - 1, high + 1];
		if (!(bottom <= top)) [bottom, top] = this.log ? [1, 10] : [0, 1];
		if (this.log) [bottom, top] = [bottom / 1.1, top * 1.1];
		else {
			const room = bottom === top ? Math.abs(bottom || 1) * 0.1 : (top - bottom) * 0.06;
			[bottom, top] = [bottom - room, top + room];
		}
		return { low, high, bottom, top };
	}

	draw() {
		if (!this.width || !this.lines) return;
		const context = fit(this.under, this.width, this.height);
		fit(this.over, this.width, this.height);
		this.scale = this.measure();
		if (!this.scale) return;
		this.axes(context);
		context.save();
		context.beginPath();
		context.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height - FOOT + 1);
		context.clip();
		for (const one of this.lines) this.line(context, one);
		this.marks(context);
		context.restore();
		this.hover();
	}

	axes(context) {
		const { low, high, bottom, top } = this.scale;
		const right = this.width - RIGHT;
		context.font = "11px system-ui, sans-serif";
		context.textBaseline = "middle";
		context.strokeStyle = colour("grid");
		context.fillStyle = colour("dim");
		const rule = (...points) => { context.beginPath(); for (const point of points) context.lineTo(...point); context.stroke(); };
		context.textAlign = "right";
		this.upTicks = valueTicks(bottom, top, Math.floor(this.height / 32), this.unit, this.log);
		for (const one of this.upTicks) {
			const y = Math.round(this.topOf(one)) + 0.5;
			rule([LEFT, y], [right, y]);
			context.fillText(upText(one, this.unit), LEFT - 7, y);
		}
		context.textAlign = "center";
		this.acrossTicks = acrossTicks(low, high, Math.floor((right - LEFT) / (this.x === "time" ? 70 : 52)), this.x);
		for (const [one, text] of this.acrossTicks) {
			const x = Math.round(this.leftOf(one)) + 0.5;
			rule([x, TOP], [x, this.height - FOOT]);
			context.fillText(text, Math.max(LEFT + 12, Math.min(x, right - context.measureText(text).width / 2)), this.height - FOOT / 2 + 2);
		}
	}

	line(context, one) {
		const stroke = lineColour(one.place);
		const ok = (value) => isKnown(value) && (!this.log || value > 0);
		// Stretches between gaps: what was not finite is no line.
		let from = 0;
		const parts = [];
		for (let place = 0; place <= one.x.length; place++) {
			if (place < one.x.length && ok(one.mean[place])) continue;
			if (place > from) parts.push([from, place]);
			from = place + 1;
		}
		const trace = (values, [begin, end], isFirst = true) => {
			for (let place = begin; place < end; place++) context[isFirst && place === begin ? "moveTo" : "lineTo"](this.leftOf(one.x[place]), this.topOf(ok(values[place]) ? values[place] : one.mean[place]));
		};
		context.fillStyle = context.strokeStyle = stroke;
		context.lineJoin = "round";
		for (const part of parts) {
			context.globalAlpha = 0.2;
			context.beginPath();
			trace(one.max, part);
			for (let place = part[1] - 1; place >= part[0]; place--) context.lineTo(this.leftOf(one.x[place]), this.topOf(ok(one.min[place]) ? one.min[place] : one.mean[place]));
			context.fill();
			context.globalAlpha = one.smooth ? 0.4 : 1;
			context.lineWidth = one.smooth ? 1 : 1.5;
			context.setLineDash(dashOf(one.place));
			context.beginPath();
			trace(one.mean, part);
			context.stroke();
			context.setLineDash([]);
			// Few points, or one alone, are seen as points.
			if (one.x.length <= 40 || part[1] - part[0] === 1) for (let place = part[0]; place < part[1]; place++) this.dot(context, one.x[place], one.mean[place], 2);
			context.globalAlpha = 1;
			if (!one.smooth) continue;
			context.lineWidth = 2;
			context.beginPath();
			trace(one.smooth, part);
			context.stroke();
		}
	}

	dot(context, x, y, radius) {
		context.beginPath();
		context.arc(this.leftOf(x), this.topOf(y), radius, 0, 7);
		context.fill();
	}

	/** Restarts and the like as lines, checkpoints as diamonds on the axis, and crosses where something was not finite. */
	marks(context) {
		const bottom = this.height - FOOT;
		const path = (points, isClosed) => { context.beginPath(); for (const point of points) context.lineTo(...point); isClosed ? context.fill() : context.stroke(); };
		context.lineWidth = 1;
		for (const one of this.ticks ?? []) {
			const x = Math.round(this.leftOf(one.x)) + 0.5;
			context.strokeStyle = context.fillStyle = colour(["checkpoint", "published"].includes(one.kind) ? "dim" : "bad");
			if (one.kind === "checkpoint") { path([[x, bottom - 8], [x + 4, bottom - 4], [x, bottom], [x - 4, bottom - 4]], true); continue; }
			context.setLineDash([4, 3]);
			path([[x, 0], [x, bottom]]);
			context.setLineDash([]);
			context.textAlign = "left";
			context.fillText(GLYPHS[one.kind] ?? "·", x + 3, 7);
		}
		context.strokeStyle = colour("bad");
		context.lineWidth = 2;
		for (const one of this.lines) {
			one.bad?.forEach((count, place) => {
				if (!count) return;
				const x = this.leftOf(one.x[place]);
				for (const side of [4, -4]) path([[x - 4, bottom - 6 - side], [x + 4, bottom - 6 + side]]);
			});
		}
	}

	/** Put the cursor at a value of x, in all charts of the group. */
	point(x) {
		for (const one of groups.get(this.group) ?? []) {
			one.cursor = x;
			if (one.scale) { one.hover(); one.hovered(x); }
		}
	}

	hover() {
		const context = this.over.getContext("2d");
		context.clearRect(0, 0, this.width, this.height);
		if (this.drag !== null) {
			context.fillStyle = colour("veil");
			context.fillRect(Math.min(this.drag, this.dragged), TOP, Math.abs(this.dragged - this.drag), this.height - TOP - FOOT);
		}
		if (this.cursor === null || this.cursor < this.scale.low || this.cursor > this.scale.high) return;
		for (const one of this.lines) {
			const place = nearest(one.x, this.cursor);
			const y = one.mean[place];
			if (one === this.lines[0]) {
				const left = Math.round(this.leftOf(one.x[place] ?? this.cursor)) + 0.5;
				context.strokeStyle = colour("dim");
				context.setLineDash([3, 3]);
				context.beginPath();
				context.moveTo(left, 0);
				context.lineTo(left, this.height - FOOT);
				context.stroke();
			}
			if (!isKnown(y) || (this.log && y <= 0)) continue;
			context.fillStyle = lineColour(one.place);
			this.dot(context, one.x[place], y, 3.5);
		}
	}
}
