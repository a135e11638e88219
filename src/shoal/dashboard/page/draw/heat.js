// A heat map of ranks by step windows, coloured by a level between 0 and 1 that the view makes of each value.
import { arrow, colour, el, fit, whenSized } from "../dom.js";

const LEFT = 58;
const FOOT = 22;

export function median(values) {
	const sorted = values.filter((one) => one !== null && Number.isFinite(one)).sort((a, b) => a - b);
	if (!sorted.length) return null;
	const middle = sorted.length >> 1;
	return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function mix(from, to, share) {
	const [a, b] = [from, to].map((text) => text.match(/[\d.]+/g).slice(0, 3).map(Number));
	return `rgb(${a.map((one, place) => Math.round(one + (b[place] - one) * share)).join(",")})`;
}

/** Of a level: low and high are told apart by their light too. */
export function heatColour(level) {
	return level < 0.5 ? mix(colour("heat-low"), colour("heat-mid"), level * 2) : mix(colour("heat-mid"), colour("heat-high"), level * 2 - 1);
}

export class Heat {
	/** `onhover(rank place, bin)` hears where one points, or null. */
	constructor({ title, onhover, onpick }) {
		Object.assign(this, { levels: [], ranks: [], bins: [], at: null });
		this.canvas = el("canvas!");
		this.node = el("div.heat", { tabindex: 0, role: "group", "aria-label": title }, this.canvas);
		this.unwatch = whenSized(this.node, (width) => { this.width = width; this.draw(); });
		const point = (at) => { this.at = at; this.draw(); onhover(at); };
		this.canvas.addEventListener("pointermove", (event) => {
			const box = this.canvas.getBoundingClientRect();
			const row = Math.floor((event.clientY - box.top) / this.high);
			const bin = Math.floor(((event.clientX - box.left - LEFT) / (this.width - LEFT - 8)) * this.bins.length);
			point(row >= 0 && row < this.ranks.length && bin >= 0 && bin < this.bins.length ? [row, bin] : null);
		});
		this.canvas.addEventListener("pointerleave", () => point(null));
		this.canvas.addEventListener("click", () => { if (this.at) onpick?.(this.at); });
		this.node.addEventListener("keydown", (event) => {
			const next = arrow(event, this.at ?? [0, -1]);
			if (!next) return;
			point([Math.max(0, Math.min(this.ranks.length - 1, next[0])), Math.max(0, Math.min(this.bins.length - 1, next[1]))]);
		});
	}

	end() { this.unwatch(); }

	/** `levels[rank][bin]` is null where nothing is known. */
	show({ levels, ranks, bins }) {
		Object.assign(this, { levels, ranks, bins });
		this.draw();
	}

	draw() {
		if (!this.width || !this.ranks.length) return;
		this.high = Math.max(6, Math.min(26, Math.floor(520 / this.ranks.length)));
		const height = this.high * this.ranks.length + FOOT;
		const context = fit(this.canvas, this.width, height);
		const wide = (this.width - LEFT - 8) / this.bins.length;
		context.font = "11px system-ui, sans-serif";
		context.textBaseline = "middle";
		const everyLabel = Math.ceil(13 / this.high);
		this.ranks.forEach((rank, row) => {
			if (row % everyLabel === 0) {
				context.fillStyle = colour("dim");
				context.textAlign = "right";
				context.fillText(String(rank), LEFT - 10, (row + 0.5) * this.high);
			}
			this.bins.forEach((_, bin) => {
				const level = this.levels[row]?.[bin];
				if (level == null) return;
				context.fillStyle = heatColour(Math.max(0, Math.min(1, level)));
				const from = Math.floor(LEFT + bin * wide);
				context.fillRect(from, row * this.high, Math.ceil(LEFT + (bin + 1) * wide) - from, this.high - (this.high > 10 ? 1 : 0));
			});
		});
		context.fillStyle = colour("dim");
		const labels = Math.max(2, Math.floor((this.width - LEFT) / 110));
		for (let label = 0; label < labels; label++) {
			const bin = Math.round((label / (labels - 1)) * (this.bins.length - 1));
			context.textAlign = label === 0 ? "left" : label === labels - 1 ? "right" : "center";
			context.fillText(String(this.bins[bin][label === labels - 1 ? 1 : 0]), LEFT + (label === 0 ? 0 : label === labels - 1 ? wide * this.bins.length : (bin + 0.5) * wide), height - FOOT / 2);
		}
		if (this.at) {
			context.strokeStyle = colour("text");
			context.lineWidth = 2;
			context.strokeRect(LEFT + this.at[1] * wide, this.at[0] * this.high, Math.max(3, wide), this.high);
		}
	}
}
