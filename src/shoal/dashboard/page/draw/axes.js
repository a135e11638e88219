// Where the lines of an axis stand, and what is written beside them.
import { compact, elapsed, inUnit } from "../format.js";

/** About `count` round values from `low` to `high`. */
export function ticks(low, high, count) {
	const wanted = (high - low) / Math.max(1, count);
	if (!(wanted > 0)) return [low];
	const size = 10 ** Math.floor(Math.log10(wanted));
	const step = [1, 2, 5, 10].find((one) => one * size >= wanted * 0.75) * size;
	const found = [];
	for (let place = Math.ceil(low / step); place * step <= high + step * 1e-9; place++) found.push(Number((place * step).toPrecision(12)));
	return found;
}

/** Decades, and in a short range what lies between them. */
function logTicks(low, high, count) {
	const decades = Math.log10(high / low);
	const all = [];
	const every = Math.max(1, Math.ceil(decades / count));
	for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += every) {
		for (const one of decades < 1 ? [1, 2, 3, 4, 5, 6, 8] : decades < 3 ? [1, 2, 5] : [1]) all.push(Number((one * 10 ** power).toPrecision(3)));
	}
	const inside = all.filter((one) => one >= low && one <= high);
	return inside.length > 1 ? inside : ticks(low, high, count);
}

export function valueTicks(low, high, count, unit, log) {
	if (log) return logTicks(low, high, count);
	// Bytes have round values of their own.
	const size = unit === "bytes" ? 1024 ** Math.max(0, Math.floor(Math.log2(high || 1) / 10)) : 1;
	return ticks(low / size, high / size, count).map((one) => one * size);
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** Seconds since the start, at round minutes and hours. */
function timeTicks(low, high, count) {
	const wanted = (high - low) / Math.max(1, count);
	const step = SECONDS.find((one) => one >= wanted) ?? Math.ceil(wanted / 604800) * 604800;
	const places = wanted < 1 ? ticks(low, high, count) : [];
	if (wanted >= 1) for (let at = Math.ceil(low / step) * step; at <= high; at += step) places.push(at);
	return places.map((at) => [at, elapsed(at)]);
}

/** Places and texts of a horizontal axis. */
export function acrossTicks(low, high, count, x) {
	return x === "time" ? timeTicks(low, high, count) : ticks(low, high, count).map((one) => [one, compact(one, 5)]);
}

export const upText = (value, unit) => inUnit(value, unit, 4);
