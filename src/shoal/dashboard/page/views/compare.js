// Runs side by side: where they first differ and in what, their recipes and plans, their curves one over the other.
import { card, el, empty, replace, table } from "../dom.js";
import { any, bytes, compact, exact, integer, number, seconds } from "../format.js";
import { get } from "../net.js";
import { t } from "../words.js";
import { curveTitle, stroke, wall } from "./wall.js";

const CALLED = { world_size: "ranks", memory_bytes: "memory" };
const SHOWN = { status: (value) => t(`status.${value}`), hash: (value) => (value ? value.slice(0, 16) : any(value)), tokens_per_s: compact, step_seconds: seconds, memory_bytes: bytes, step: integer, loss: (value) => number(value, 8), validation_loss: (value) => number(value, 8) };

export function compare(app, _, query) {
	const ids = (query.get("ids") ?? "").split(",").filter(Boolean).slice(0, 8);
	const node = el("div.compare", el("p.loading", t("loading")));
	app.crumbs([t("compare"), null]);
	let inner = null;

	async function load() {
		const [answer, ...headers] = await Promise.all([get("compare", { ids: ids.join(",") }), ...ids.map((id) => get(`run/${id}`).catch(() => null))]);
		const known = headers.filter(Boolean);
		const curves = (known[0]?.curves ?? []).filter((curve) => known.every((one) => one.curves.some((other) => other.name === curve.name)));
		const { names } = answer;
		inner?.end();
		inner = wall(app, { runs: ids.map((id, place) => ({ id, label: names[place] })), curves, query, onquery: (values) => app.go(`/compare?${new URLSearchParams({ ids: ids.join(","), ...values })}`, { quietly: true }) });
		replace(node, el("h1", t("compare.of", { count: ids.length })), first(answer, names),
			el("div.pair", summary(answer.summary, names), el("div", differences(t("recipe"), answer.recipe, names), differences(t("column.plan"), answer.plan, names))), inner.node);
	}

	if (ids.length < 2) replace(node, empty(t("compare.none"), t("compare.hint")));
	else load().catch((error) => replace(node, empty(error.message)));
	return { node, end: () => inner?.end(), again: () => load().catch((error) => app.note(error.message)), points: (value) => inner?.points(value), tick: () => inner?.tick() };
}

function first({ first_difference: difference, common_steps: steps }, names) {
	if (!difference) return steps ? el("div.verdict.good", `✓ ${t("same", { steps: integer(steps) })}`) : el("div.verdict", t("no.common"));
	return el("div.verdict", el("b", t("first.difference", { step: integer(difference.step), what: curveTitle(difference.what.replaceAll(" ", "_")) })),
		el("dl.facts", difference.values.map((value, place) => el("div", el("dt", names[place]), el("dd.mono", { "data-value": any(value) }, any(value))))));
}

const columns = (names, withStroke) => [{ text: "" }, ...names.map((name, place) => ({ text: withStroke ? el("span.named", stroke(place), name) : name, number: true }))];

function summary(rows, names) {
	const keys = Object.keys(rows[0]).filter((key) => !["id", "name", "proof"].includes(key));
	return card(t("summary"), null, table(t("summary"), columns(names, true), keys.map((key) => {
		const show = SHOWN[key] ?? ((value) => (typeof value === "number" ? exact(value) : any(value)));
		return [t(`column.${CALLED[key] ?? key}`), ...rows.map((row) => row[key]).map((value) => el("span", { title: any(value) }, show(value)))];
	})));
}

export function differences(title, rows, names) {
	if (!rows?.length) return card(title, null, el("p.dim", t("no.difference")));
	return card(title, null, table(title, columns(names), rows.map((row) => [el("span.mono", row.key), ...row.values.map((value) => el("span.mono", any(value)))])));
}
