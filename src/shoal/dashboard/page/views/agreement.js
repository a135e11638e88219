// How replicas and parameter servers agree: staleness, views and deaths, rounds of islands, compression, caches and queues.
import { card, el, empty, replace, table } from "../dom.js";
import { any, bytes, clock, integer, number, percent, seconds } from "../format.js";
import { get } from "../net.js";
import { has, t } from "../words.js";
import { Chart } from "../draw/chart.js";

export function agreement(app, run) {
  const node = el("div", { class: "agreement" }, el("p", { class: "empty dim" }, t("loading")));
  let charts = [], isDirty = false, loadedAt = 0;

  async function load() {
    [loadedAt, isDirty] = [Date.now(), false];
    const answer = await get(`run/${run.id}/agreement`);
    for (const one of charts) one.end();
    charts = [];
    const cards = [staleness(answer.staleness), line("distance", answer.rounds?.distance ?? answer.rounds, answer.rounds), happened(answer), compression(answer.compression), cache(answer.cache), queues(answer.queues ?? answer.queue_lengths)].filter(Boolean);
    replace(node, cards.length ? el("div", { class: "charts" }, cards) : empty(t("no.agreement"), t("no.agreement.hint")));
  }

  /** A chart of [x, y] pairs or of two columns. */
  function line(name, values, rounds) {
    const steps = rounds?.steps ?? rounds?.step ?? rounds?.x;
    const pairs = Array.isArray(values) ? (Array.isArray(steps) ? steps.map((x, place) => [x, values[place]]) : values.map((one) => (Array.isArray(one) ? one : [one.step, one.distance]))) : [];
    const known = pairs.filter(([, y]) => y !== null && y !== undefined);
    if (!known.length) return null;
    const chart = new Chart({ title: t(`agree.${name}`) });
    charts.push(chart);
    const [x, y] = [known.map(([one]) => one), known.map(([, one]) => one)];
    chart.show([{ label: run.name, place: 0, x, min: y, max: y, mean: y, bad: [] }], { x: "step", log: false, smooth: 0, ticks: [], range: null });
    return chart.node;
  }

  load().catch((error) => replace(node, empty(t("no.agreement"), error.message)));
  return { node, end() { for (const one of charts) one.end(); }, again: load, points() { isDirty = true; }, changed() { isDirty = true; },
    tick() { if (isDirty && Date.now() - loadedAt > 5000) load().catch(() => {}); } };
}

/** Rows of worker and counts, whichever way they are written: {worker: [counts]} or [{worker, counts}]. */
function byWorker(value) {
  if (!value) return [];
  const rows = Array.isArray(value) ? value.map((one) => [one.worker ?? one.name, one.counts]) : Object.entries(value);
  return rows.map(([worker, counts]) => [worker, Array.isArray(counts) ? counts.map((count, late) => (Array.isArray(count) ? count : [late, count])) : Object.entries(counts ?? {}).map(([late, count]) => [Number(late), count])]);
}

function staleness(value) {
  const rows = byWorker(value);
  if (!rows.length) return null;
  const most = Math.max(1, ...rows.flatMap(([, counts]) => counts.map(([, count]) => count)));
  const last = Math.max(...rows.flatMap(([, counts]) => counts.map(([late]) => late)));
  return card(t("agree.staleness"), null, el("p", { class: "dim" }, t("agree.staleness.why")), table(t("agree.staleness"),
    [{ text: t("worker") }, ...Array.from({ length: last + 1 }, (_, late) => ({ text: String(late), number: true })), { text: t("mean"), number: true }],
    rows.map(([worker, counts]) => {
      const found = new Map(counts);
      const total = counts.reduce((sum, [, count]) => sum + count, 0);
      return [worker, ...Array.from({ length: last + 1 }, (_, late) => el("span", { class: "column", "data-count": found.get(late) ?? 0 },
        el("span", { class: "up", "aria-hidden": "true", style: { height: `${((found.get(late) ?? 0) / most) * 30}px` } }), integer(found.get(late) ?? 0))),
      number(counts.reduce((sum, [late, count]) => sum + late * count, 0) / (total || 1), 3)];
    }), { "data-table": "staleness" }));
}

function happened(answer) {
  const rows = ["views", "epochs", "deaths", "elections", "recoveries"].flatMap((kind) => (Array.isArray(answer[kind]) ? answer[kind] : []).map((one) => ({ kind, ...one }))).sort((one, other) => (one.t ?? 0) - (other.t ?? 0));
  if (!rows.length) return null;
  const members = (one) => (Array.isArray(one.members) ? one.members.join(" ") : one.who ?? one.worker ?? one.member ?? one.name ?? "");
  return card(t("agree.views"), null, table(t("agree.views"), [{ text: t("time") }, { text: t("detail.what") }, { text: t("epoch"), number: true }, { text: t("members") }, { text: t("cause") }],
    rows.slice(-200).map((one) => [clock(one.t), has(`agree.${one.kind}.one`) ? t(`agree.${one.kind}.one`) : one.kind, one.epoch === undefined ? "–" : integer(one.epoch), members(one), one.cause ?? one.text ?? one.reason ?? ""])));
}

function facts(title, entries) {
  const known = entries.filter(([, value]) => value !== null && value !== undefined);
  return known.length ? card(title, null, el("dl", { class: "facts" }, known.map(([key, value]) => el("div", { "data-fact": key }, el("dt", {}, has(`fact.${key}`) ? t(`fact.${key}`) : key.replaceAll("_", " ")), el("dd", {}, value))))) : null;
}

const inWords = (key, value) => (value === null || value === undefined ? null : typeof value !== "number" ? any(value) : key.endsWith("bytes") ? bytes(value) : key.endsWith("seconds") ? seconds(value) : number(value, 6));

function compression(value) {
  if (!value) return null;
  const [sent, dense] = [value.sent_bytes ?? value.sent, value.dense_bytes ?? value.dense];
  return facts(t("agree.compression"), [["ratio", sent && dense ? `${number(dense / sent, 4)} ×` : null], ...Object.entries(value).map(([key, one]) => [key, inWords(/bytes|sent|dense|residual/.test(key) ? "bytes" : key, one)])]);
}

function cache(value) {
  if (!value) return null;
  const [hits, all] = [(value.memory_hits ?? 0) + (value.disk_hits ?? 0), (value.memory_hits ?? 0) + (value.disk_hits ?? 0) + (value.fetches ?? value.misses ?? 0)];
  return facts(t("agree.cache"), [["hit_rate", all ? percent(hits / all) : null], ...Object.entries(value).map(([key, one]) => [key, inWords(key, one)])]);
}

function queues(value) {
  if (!value) return null;
  const rows = Array.isArray(value) ? value.map((one) => [one.process ?? one.name ?? one.worker, one]) : Object.entries(value);
  return rows.length ? card(t("agree.queues"), null, table(t("agree.queues"), [{ text: t("process") }, { text: t("length") }], rows.map(([name, one]) => [name, any(one?.length ?? one)]))) : null;
}
