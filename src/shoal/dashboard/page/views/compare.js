// Runs side by side: where they first differ and in what, their recipes and plans, their curves one over the other.
import { card, el, empty, replace, table } from "../dom.js";
import { any, bytes, compact, exact, integer, number, seconds } from "../format.js";
import { get } from "../net.js";
import { has, t } from "../words.js";
import { stroke, wall } from "./wall.js";

const SHOWN = { tokens_per_s: compact, step_seconds: seconds, memory_bytes: bytes, step: integer, loss: (value) => number(value, 8), validation_loss: (value) => number(value, 8), wall_s: seconds };

export function compare(app, _, query) {
  const ids = (query.get("ids") ?? "").split(",").filter(Boolean).slice(0, 10);
  const names = () => ids.map((id) => app.rows.get(id)?.name ?? id);
  const node = el("div", { class: "compare" }, el("p", { class: "empty dim" }, t("loading")));
  app.crumbs([t("compare"), null]);
  let inner = null;

  async function load() {
    const [answer, ...headers] = await Promise.all([get("compare", { ids: ids.join(",") }), ...ids.map((id) => get(`run/${id}`).catch(() => null))]);
    for (const one of headers) if (one && !app.rows.has(one.id)) app.rows.set(one.id, one);
    const known = headers.filter(Boolean);
    const curves = (known[0]?.curves ?? []).filter((curve) => known.every((one) => one.curves.some((other) => other.name === curve.name)));
    inner?.end();
    inner = wall(app, { runs: ids.map((id, place) => ({ id, label: names()[place] })), curves, query, onquery: (values) => app.go(`/compare?${new URLSearchParams({ ids: ids.join(","), ...values })}`, { quietly: true }) });
    replace(node, el("h1", {}, t("compare.of", { count: ids.length })), first(answer.first_difference, names()),
      el("div", { class: "pair" }, summary(answer.summary, names()), el("div", {}, differences(t("recipe"), answer.recipe, names()), differences(t("plan"), answer.plan, names()))), inner.node);
  }

  if (ids.length < 2) replace(node, empty(t("compare.none"), t("compare.hint")));
  else load().catch((error) => replace(node, empty(error.message)));
  return { node, end: () => inner?.end(), again: () => load().catch((error) => app.note(error.message)), points: (value) => inner?.points(value), tick: () => inner?.tick() };
}

function first(difference, names) {
  if (!difference) return el("div", { class: "verdict good" }, el("b", {}, "✓ ", t("same")), " ", t("same.why"));
  return el("div", { class: "verdict" }, el("b", {}, t("first.difference", { step: integer(difference.step), what: has(`curve.${difference.what}`) ? t(`curve.${difference.what}`) : difference.what })),
    el("dl", { class: "facts" }, (difference.values ?? []).map((value, place) => el("div", {}, el("dt", {}, names[place]), el("dd", { class: "mono", "data-value": any(value) }, any(value))))));
}

const columns = (names, withStroke) => [{ text: "" }, ...names.map((name, place) => ({ text: withStroke ? el("span", { class: "named" }, stroke(place), name) : name, number: true }))];

function summary(rows, names) {
  const entries = Array.isArray(rows) && rows[0] && "values" in rows[0] ? rows : keyed(rows);
  return card(t("summary"), null, table(t("summary"), columns(names, true), entries.map((row) => {
    const show = SHOWN[row.key] ?? ((value) => (typeof value === "number" ? exact(value) : any(value)));
    return [has(`column.${row.key}`) ? t(`column.${row.key}`) : row.key.replaceAll("_", " "), ...row.values.map((value) => el("span", { title: any(value) }, show(value)))];
  })));
}

/** One object for each run, turned into one row for each key. */
function keyed(rows) {
  const keys = [...new Set((rows ?? []).flatMap((row) => Object.keys(row ?? {})))];
  return keys.map((key) => ({ key, values: rows.map((row) => row?.[key] ?? null) }));
}

export function differences(title, rows, names) {
  if (!rows?.length) return card(title, null, el("p", { class: "dim" }, t("no.difference")));
  return card(title, null, table(title, columns(names), rows.map((row) => [el("span", { class: "mono" }, row.key), ...row.values.map((value) => el("span", { class: "mono" }, any(value)))])));
}
