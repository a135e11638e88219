// Elements out of values. Text from a run is only ever a text node or an attribute, never markup.

import { t } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

/** `what` is a tag with classes, as `span.dim`, and a `!` if it is only to be seen; then its attributes, if it has some, and what is in it. */
export const el = (what, ...rest) => fill(document.createElement(what.split(/[.!]/)[0]), what, rest);

export const svg = (what, ...rest) => fill(document.createElementNS(SVG, what.split(".")[0]), what, rest);

const present = (children) => children.flat(9).filter((child) => child != null && child !== false);

function fill(node, what, rest) {
	const [, ...classes] = what.replace("!", "").split(".");
	if (what.endsWith("!")) node.setAttribute("aria-hidden", "true");
	const hasProps = rest[0] && typeof rest[0] === "object" && !Array.isArray(rest[0]) && !(rest[0] instanceof Node);
	if (classes.length) node.setAttribute("class", classes.join(" "));
	for (const [key, value] of Object.entries(hasProps ? rest.shift() : {})) {
		if (value == null || value === false) continue;
		if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
		else if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
		else if (key === "value" || key === "checked") node[key] = value;
		else node.setAttribute(key, value === true ? "" : value);
	}
	node.append(...present(rest));
	return node;
}

/** What matters less. */
export const dim = (...children) => el("span.dim", children);

export function replace(node, ...children) {
	node.replaceChildren(...present(children));
	return node;
}

export function button(label, onclick, props) {
	return el("button", { type: "button", onclick, ...props }, label);
}

/** A button that is a sign, with words for who hears or points. */
export const icon = (sign, label, onclick, props) => button(sign, onclick, { class: "quiet", "aria-label": label, title: label, ...props });

export function copier(text) {
	const node = button(t("copy"), async () => {
		try { await navigator.clipboard.writeText(text); node.textContent = t("copied"); } catch { getSelection().selectAllChildren(node.previousSibling); }
	}, { class: "quiet", "aria-label": `${t("copy")}: ${text}` });
	return node;
}

/** Where an arrow key leads in rows and places; nothing for other keys. */
export function arrow(event, [row, place]) {
	const next = { ArrowLeft: [row, place - 1], ArrowRight: [row, place + 1], ArrowUp: [row - 1, place], ArrowDown: [row + 1, place] }[event.key];
	if (!next) return null;
	event.preventDefault();
	event.stopPropagation();
	return next;
}

/** Buttons of which one is pressed. */
export function segments(label, options, chosen, onchange) {
	const group = el("div.segments", { role: "group", "aria-label": label });
	for (const [value, text] of options) {
		group.append(button(text, () => {
			for (const one of group.children) one.setAttribute("aria-pressed", String(one.dataset.value === String(value)));
			onchange(value);
		}, { "data-value": value, "aria-pressed": String(value === chosen) }));
	}
	return group;
}

export function select(label, options, chosen, onchange, props) {
	const node = el("select", { "aria-label": label, onchange: () => onchange(node.value), ...props },
		options.map(([value, text]) => el("option", { value }, text)));
	node.value = chosen;
	return node;
}

export const column = (key, number) => ({ text: t(key), number });

/** A table; cells are strings or nodes, a column that is `number` stands right. */
export function table(caption, columns, rows, props) {
	return el("div.scroll", { tabindex: 0, role: "group", "aria-label": caption },
		el("table.plain", { ...props },
			el("caption.unseen", caption),
			el("thead", el("tr", columns.map((one) => el(one.text ? "th" : "td", { scope: one.text ? "col" : null, class: one.number ? "number" : null }, one.text)))),
			el("tbody", rows.map((row) => el("tr", row.map((cell, place) =>
				el(place ? "td" : "th", { scope: place ? null : "row", class: columns[place].number ? "number" : null }, cell ?? "–")))))));
}

export function card(title, tools, ...body) {
	return el("section.card", { "aria-label": title },
		el("div.cardhead", el("h2", title), el("div.tools", tools)), body);
}

/** What a picture shows, as a table that opens on demand. */
export function asTable(label, make) {
	const node = el("details.astable", el("summary", label));
	node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(make()); });
	return node;
}

export function empty(text, hint) {
	return el("div.empty", el("p", text), hint ? el("p.dim", hint) : null);
}

let probe = null;
const known = new Map();

/** The colour that a variable of the style sheet has now, as canvas takes it. */
export function colour(name) {
	if (!known.has(name)) {
		probe ??= document.body.appendChild(el("span.unseen!"));
		probe.style.color = `var(--${name})`;
		known.set(name, getComputedStyle(probe).color);
	}
	return known.get(name);
}

export function forgetColours() { known.clear(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
	forgetColours();
	document.dispatchEvent(new Event("themechange"));
});

/** A canvas of so many CSS pixels on any screen, and its context with a scale to match. */
export function fit(canvas, width, height) {
	const ratio = devicePixelRatio || 1;
	canvas.width = Math.round(width * ratio);
	canvas.height = Math.round(height * ratio);
	canvas.style.width = `${width}px`;
	canvas.style.height = `${height}px`;
	const context = canvas.getContext("2d");
	context.setTransform(ratio, 0, 0, ratio, 0, 0);
	return context;
}

/** Calls `draw(width)` now and when the element gets another width, or the theme another colour; the call's result ends it. */
export function whenSized(node, draw) {
	let last = 0, asked = 0;
	const again = () => { cancelAnimationFrame(asked); asked = requestAnimationFrame(() => { if (last) draw(last); }); };
	const watcher = new ResizeObserver((entries) => {
		const width = Math.floor(entries[0].contentRect.width);
		if (width && width !== last) { last = width; again(); }
	});
	watcher.observe(node);
	document.addEventListener("themechange", again);
	return () => { watcher.disconnect(); cancelAnimationFrame(asked); document.removeEventListener("themechange", again); };
}
