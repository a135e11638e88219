// Numbers for people: units, few digits in tables, all digits where one asks for them.
import { t } from "./words.js";

const NOTHING = "–";
const missing = (value) => value == null || !Number.isFinite(value);

export function integer(value) {
	return missing(value) ? NOTHING : Math.round(value).toLocaleString("en-US");
}

/** So many significant digits, without zeros at the end that say nothing. */
export function number(value, digits = 4) {
	if (missing(value)) return NOTHING;
	if (value === 0) return "0";
	const size = Math.abs(value);
	if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
	if (size >= 10 ** (digits - 1)) return integer(value);
	return Number(value.toPrecision(digits)).toString();
}

/** Every digit that there is. */
export function exact(value) {
	return missing(value) ? NOTHING : String(value);
}

const COMPACT = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function compact(value, digits = 3) {
	if (missing(value)) return NOTHING;
	for (const [size, letter] of COMPACT) if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(digits))}${letter}`;
	return number(value, digits);
}

export function bytes(value) {
	if (missing(value)) return NOTHING;
	let unit = 0, size = value;
	while (Math.abs(size) >= 1024 && unit < 5) { size /= 1024; unit += 1; }
	return `${Number(size.toPrecision(size >= 100 ? 4 : 3))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

export function seconds(value) {
	if (missing(value)) return NOTHING;
	const size = Math.abs(value);
	if (size === 0) return "0 s";
	if (size < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
	if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
	if (size < 120) return `${Number(value.toPrecision(3))} s`;
	if (size < 7200) return `${Math.floor(size / 60)} min ${String(Math.floor(size % 60)).padStart(2, "0")} s`;
	if (size < 172800) return `${Math.floor(size / 3600)} h ${String(Math.floor((size % 3600) / 60)).padStart(2, "0")} min`;
	return `${Math.floor(size / 86400)} d ${Math.floor((size % 86400) / 3600)} h`;
}

export function age(value) {
	if (missing(value)) return NOTHING;
	const size = Math.max(0, value);
	const [count, unit] = size < 90 ? [size, "s"] : size < 5400 ? [size / 60, "min"] : size < 129600 ? [size / 3600, "h"] : [size / 86400, "d"];
	return t("age", { count: Math.round(count), unit });
}

export function percent(value, digits = 1) {
	return missing(value) ? NOTHING : `${(value * 100).toFixed(digits)}%`;
}

export function clock(t, withDay = true) {
	if (missing(t)) return NOTHING;
	const when = new Date(t * 1000);
	const two = (value) => String(value).padStart(2, "0");
	const time = `${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
	return withDay ? `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${time}` : time;
}

/** Time since a start: seconds, then hours, minutes and seconds. */
export function elapsed(value) {
	if (missing(value) || value < 60) return seconds(value);
	const [hours, ...rest] = [value / 3600, (value / 60) % 60, value % 60].map((one) => String(Math.floor(one)).padStart(2, "0"));
	return [Number(hours), ...rest].join(":");
}

/** A value of a curve in its unit. */
export function inUnit(value, unit, digits) {
	if (unit === "bytes" || unit === "B") return bytes(value);
	if (unit === "s" || unit === "seconds") return seconds(value);
	if (unit && unit.endsWith("/s")) return `${compact(value, digits ?? 4)}/s`;
	return number(value, digits ?? 5);
}

export function any(value) {
	if (value == null) return NOTHING;
	if (typeof value === "number") return exact(value);
	return typeof value === "object" ? JSON.stringify(value) : String(value);
}

