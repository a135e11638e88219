// The selected runs of the overview in one chart.
import { dim, el, replace, select } from "../dom.js";
import { get } from "../net.js";
import { t } from "../words.js";
import { curveTitle, wall } from "./wall.js";

export function overlay(app, ids, all) {
	const place = el("div");
	const head = el("div.bar-tools");
	let inner = null, chosen = "loss";

	function draw(curves) {
		inner?.end();
		const curve = curves.find((one) => one.name === chosen) ?? curves[0];
		if (!curve) { replace(place, el("p.empty.dim", t("no.points"))); return; }
		inner = wall(app, { runs: ids.map((id) => ({ id, label: app.rows.get(id)?.name ?? id })), curves: [curve], height: 240 });
		replace(place, inner.node);
		replace(head, el("h2", t("overlay")), select(t("curve"), curves.map((one) => [one.name, curveTitle(one.name)]), curve.name, (value) => { chosen = value; draw(curves); }),
			all > ids.length ? dim(t("drawn", { drawn: ids.length, all })) : null);
	}

	get(`run/${ids[0]}`).then((run) => draw(run.curves), (error) => app.note(error.message));
	return { node: el("section.card", { "aria-label": t("overlay") }, head, place), end: () => inner?.end(), points: (value) => inner?.points(value), again: () => inner?.again() };
}
