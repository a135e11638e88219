// What happened, in words; the logs of every rank; the recipe and its difference to another run; certificates.
import { button, card, el, empty, replace, segments, select, table } from "../dom.js";
import { any, bytes, clock, integer } from "../format.js";
import { get } from "../net.js";
import { said, t } from "../words.js";
import { differences } from "./compare.js";

const LEVELS = { info: "·", warning: "!", error: "✕" };
const PAGE = 65536;

export function journal(app, run) {
  const state = { level: "", search: "" };
  const list = el("ol", { class: "events" });
  const more = el("div", {});
  const search = el("input", { type: "search", placeholder: t("search.story"), "aria-label": t("search.story"), oninput: () => { state.search = search.value; clearTimeout(timer); timer = setTimeout(load, 150); } });
  let timer = 0, isDirty = false, loadedAt = 0, next = null;

  async function load(after) {
    [loadedAt, isDirty] = [Date.now(), false];
    const answer = await get(`run/${run.id}/story`, { ...state, after: typeof after === "number" || typeof after === "string" ? after : null });
    const items = answer.items.map(item);
    if (after === undefined || typeof after === "object") replace(list, items.length ? items : el("li", { class: "empty dim" }, t("no.events")));
    else list.append(...items);
    next = answer.next;
    replace(more, next === null || next === undefined ? null : button(t("more"), () => load(next)));
  }

  const tools = el("div", { class: "bar-tools" }, el("div", { class: "searchbox" }, search, el("kbd", { "aria-hidden": "true" }, "/")),
    segments(t("level"), [["", t("all")], ...Object.keys(LEVELS).map((one) => [one, t(`level.${one}`)])], "", (value) => { state.level = value; load(); }));
  const logs = logViewer(app, run);
  const node = el("div", { class: "journal" },
    failure(run),
    el("div", { class: "withside even" }, card(t("story"), null, tools, list, more), el("div", {}, logs.node, certificates(run.certificates), recipe(app, run))));
  const fail = (error) => app.note(error.message);
  load().catch(fail);
  return { node, again: load, points() { isDirty = true; }, changed() { isDirty = true; },
    header(header) { run = header; },
    tick() { if (isDirty && Date.now() - loadedAt > 4000 && list.scrollTop < 40) load().catch(() => {}); } };
}

function item(one) {
  const level = one.level in LEVELS ? one.level : "info";
  return el("li", { class: level, "data-kind": one.kind }, el("time", { title: clock(one.t) }, clock(one.t, false)),
    el("span", { class: "level", title: t(`level.${level}`), role: "img", "aria-label": t(`level.${level}`) }, LEVELS[level]),
    el("span", { class: "text" }, said(one.text, one.words)),
    el("span", { class: "dim" }, [one.step === null || one.step === undefined ? null : t("step.of", { step: integer(one.step) }), one.rank === null || one.rank === undefined ? null : t("rank", { rank: one.rank })].filter(Boolean).join(" · ")));
}

/** Why the run failed, with what to try where the server says it. */
function failure(run) {
  const report = run.failure ?? run.summary?.failure ?? run.summary?.error;
  if (!report) return null;
  const text = typeof report === "string" ? report : report.text ?? report.report ?? any(report);
  const tries = typeof report === "object" ? report.what_to_try ?? report.tries ?? [] : [];
  return el("section", { class: "card failure", "aria-label": t("failure") }, el("h2", {}, t("failure")), el("pre", { tabindex: 0 }, text),
    [tries].flat().length ? el("ul", {}, [tries].flat().map((one) => el("li", {}, one))) : null);
}

function logViewer(app, run) {
  const names = (run.logs ?? []).map((one) => one.name);
  const text = el("pre", { class: "log", tabindex: 0, "aria-label": t("log") });
  const where = el("span", { class: "dim" });
  const search = el("input", { type: "search", placeholder: t("search.log"), "aria-label": t("search.log"), oninput: () => { clearTimeout(timer); timer = setTimeout(() => load(-PAGE), 200); } });
  let chosen = names[0], timer = 0, place = { from: 0, to: 0, size: 0 };

  async function load(at) {
    if (!chosen) return;
    try {
      place = await get(`run/${run.id}/log`, { name: chosen, at, search: search.value });
      replace(text, marked(place.text, search.value));
      replace(where, place.size ? t("log.part", { from: bytes(place.from), to: bytes(place.to), size: bytes(place.size) }) : t("log.empty"));
      if (at < 0) text.scrollTop = text.scrollHeight; else text.scrollTop = 0;
    } catch (error) { app.note(error.message); }
  }

  const node = names.length ? card(t("logs"), null,
    el("div", { class: "bar-tools" }, select(t("log"), run.logs.map((one) => [one.name, `${one.name} · ${bytes(one.bytes)}`]), chosen, (value) => { chosen = value; load(-PAGE); }), search,
      button("⇤", () => load(0), { class: "quiet", "aria-label": t("log.first"), title: t("log.first") }), button("‹", () => load(Math.max(0, place.from - PAGE)), { class: "quiet", "aria-label": t("log.before"), title: t("log.before") }),
      button("›", () => load(place.to < place.size ? place.to : -PAGE), { class: "quiet", "aria-label": t("log.after"), title: t("log.after") }), button("⇥", () => load(-PAGE), { class: "quiet", "aria-label": t("log.last"), title: t("log.last") })),
    text, where) : card(t("logs"), null, empty(t("no.logs")));
  load(-PAGE);
  return { node };
}

/** Text in which what was searched for stands out. */
function marked(text, wanted) {
  if (!wanted) return text;
  const parts = [];
  const [lower, needle] = [text.toLowerCase(), wanted.toLowerCase()];
  let from = 0;
  for (let at = lower.indexOf(needle); at >= 0 && parts.length < 4000; at = lower.indexOf(needle, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + needle.length)));
    from = at + needle.length;
  }
  parts.push(text.slice(from));
  return parts;
}

function certificates(list) {
  const rows = [list ?? []].flat().flatMap((one) => (one.plans ? one.plans.map((plan) => ({ ...plan, mutants: one.mutants })) : [one])).filter((one) => one && (one.plan || one.ok !== undefined));
  if (!rows.length) return null;
  return card(t("certificates"), null, table(t("certificates"), [{ text: t("column.plan") }, { text: t("result") }, { text: t("worst") }, { text: t("mutants") }], rows.map((one) => [el("span", { class: "mono" }, any(one.plan)),
    one.ok ? el("span", { class: "mark good" }, "✓ ", one.bitwise ? t("bitwise") : t("within")) : el("span", { class: "mark bad" }, "✕ ", t("refuted")),
    one.worst ? Object.entries(one.worst).map(([key, value]) => `${key} ${any(value)}`).join(", ") : "–",
    one.mutants?.length ? t("caught", { caught: one.mutants.filter((mutant) => mutant.caught).length, all: one.mutants.length }) : "–"])));
}

function recipe(app, run) {
  if (!run.recipe) return null;
  const text = el("pre", { tabindex: 0, class: "recipe" }, run.recipe);
  const place = el("div", {}, text);
  const others = [...app.rows.values()].filter((row) => row.id !== run.id).slice(0, 500);
  const against = select(t("against"), [["", t("recipe.whole")], ...others.map((row) => [row.id, t("against.run", { name: row.name })])], "", async (id) => {
    if (!id) { replace(place, text); return; }
    try {
      const answer = await get("compare", { ids: `${run.id},${id}` });
      const names = [run.name, app.rows.get(id).name];
      replace(place, differences(t("recipe"), answer.recipe, names), differences(t("plan"), answer.plan, names));
    } catch (error) { app.note(error.message); }
  });
  return card(t("recipe"), against, place);
}
