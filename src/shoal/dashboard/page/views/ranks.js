// The ranks beside each other: who is slow and since when, who waits for whom, memory, places on hosts, and traffic.
import { asTable, card, el, empty, replace, segments, table } from "../dom.js";
import { bytes, integer, number, percent, seconds } from "../format.js";
import { Heat, heatColour, median } from "../draw/heat.js";
import { get } from "../net.js";
import { has, t } from "../words.js";

const PARTS = ["weights", "gradients", "optimizer", "activations", "other"];
// Over the median of all ranks in the same steps, over that of the whole run, or as a share of the step's time.
const MEASURES = { busy: "window", step: "run", wait: "share", data: "share" };
const RATIO = [0.7, 1.3];
const SHARE = 0.5;

function ratios(answer, measure) {
  const values = answer[measure] ?? [];
  if (MEASURES[measure] === "share") return values.map((row, rank) => row.map((one, bin) => divide(one, answer.step?.[rank]?.[bin])));
  const all = median(values.flat());
  const medians = (answer.bins ?? []).map((_, bin) => (MEASURES[measure] === "run" ? all : median(values.map((row) => row[bin]))));
  return values.map((row) => row.map((one, bin) => divide(one, medians[bin])));
}

const divide = (one, other) => (one === null || one === undefined || !other ? null : one / other);
const levelOf = (measure, ratio) => (ratio === null ? null : MEASURES[measure] === "share" ? 0.5 + ratio / SHARE / 2 : (ratio - RATIO[0]) / (RATIO[1] - RATIO[0]));

export function ranks(app, run) {
  const node = el("div", { class: "ranks" }, el("p", { class: "empty dim" }, t("loading")));
  const readout = el("p", { class: "readout", role: "status" });
  const legend = el("span", { class: "scale" });
  let answer = null, measure = "busy", heat = null, isDirty = false, loadedAt = 0;

  async function load() {
    loadedAt = Date.now();
    isDirty = false;
    answer = await get(`run/${run.id}/ranks`, { bins: 120 });
    draw();
  }

  function draw() {
    heat?.end();
    heat = null;
    const hasTimes = answer.ranks?.length && answer.bins?.length;
    replace(node,
      hasTimes ? heatCard() : el("section", { class: "card" }, empty(t("no.steps"))),
      el("div", { class: "pair" }, answer.scores?.length ? scores(answer) : null, answer.mesh?.places?.length ? mesh(answer.mesh, run) : null),
      answer.memory?.length ? memory(answer.memory) : null,
      answer.traffic?.length ? traffic(answer.traffic) : null);
    if (hasTimes) paint();
  }

  function heatCard() {
    heat = new Heat({ title: t("heat.says", { ranks: answer.ranks.length }), onhover: hover });
    const chooser = segments(t("measure"), Object.keys(MEASURES).filter((one) => answer[one]).map((one) => [one, t(`measure.${one}`)]), measure, (value) => { measure = value; paint(); });
    return card(t("heat"), chooser, el("div", { class: "heathead" }, readout, legend), heat.node, asTable(t("as.table"), heatTable));
  }

  function paint() {
    heat.show({ levels: ratios(answer, measure).map((row) => row.map((one) => levelOf(measure, one))), ranks: answer.ranks, bins: answer.bins });
    const isShare = MEASURES[measure] === "share";
    replace(legend, el("span", {}, isShare ? "0%" : `${RATIO[0]} ×`), el("span", { class: "ramp", "aria-hidden": "true", style: { background: `linear-gradient(to right, ${[isShare ? 0.5 : 0, isShare ? 0.75 : 0.5, 1].map(heatColour).join(",")})` } }),
      el("span", {}, isShare ? percent(SHARE, 0) : `${RATIO[1]} ×`), el("span", { class: "dim" }, t(`over.${MEASURES[measure]}`)));
    hover(null);
  }

  function hover(at) {
    if (!at) { replace(readout, el("span", { class: "dim" }, t("heat.hint"))); return; }
    const [row, bin] = at;
    const ratio = ratios(answer, measure)[row][bin];
    const [first, last] = answer.bins[bin];
    replace(readout, el("span", { class: "at" }, `${t("rank", { rank: answer.ranks[row] })} · ${first === last ? t("step.of", { step: integer(first) }) : t("steps.of", { first: integer(first), last: integer(last) })}`),
      el("b", { "data-value": String(answer[measure][row][bin]) }, seconds(answer[measure][row][bin])), el("span", { class: "dim" }, ratio === null ? "" : MEASURES[measure] === "share" ? percent(ratio) : `${number(ratio, 3)} ×`));
  }

  function heatTable() {
    const kinds = Object.keys(MEASURES).filter((one) => answer[one]);
    return table(t("heat"), [{ text: t("column.rank"), number: true }, ...kinds.map((one) => ({ text: t(`measure.${one}`), number: true }))],
      answer.ranks.map((rank, row) => [String(rank), ...kinds.map((one) => seconds(mean(answer[one][row] ?? [])))]));
  }

  load().catch((error) => replace(node, empty(t("no.steps"), error.message)));
  return {
    node,
    end: () => heat?.end(),
    again: load,
    header(header) { run = header; const place = node.querySelector(".mesh"); if (place && answer?.mesh) place.replaceWith(mesh(answer.mesh, run)); },
    points() { isDirty = true; },
    changed() { isDirty = true; },
    tick() { if (isDirty && Date.now() - loadedAt > 5000 && !node.matches(":hover") && !node.contains(document.activeElement)) load().catch(() => {}); },
  };
}

function mean(values) {
  const known = values.filter((one) => one !== null && Number.isFinite(one));
  return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
}

const signed = (share) => `${share > 0 ? "+" : ""}${percent(share)}`;

function meter(share, kind) {
  return el("span", { class: `meter ${kind}`, "aria-hidden": "true" }, el("span", { style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } }));
}

/** The slowest first: 1 is as fast as the best rank. */
function scores(answer) {
  const slowest = [...answer.scores].sort((one, other) => one.score - other.score);
  const kinds = answer.waits ? Object.keys(answer.waits) : [];
  const columns = [{ text: t("column.rank"), number: true }, { text: t("score"), number: true }, { text: "" }, { text: t("against.own"), number: true }, ...kinds.map((axis) => ({ text: t("waits.on", { axis }), number: true }))];
  return card(t("scores"), null, el("p", { class: "dim" }, t("scores.why")), table(t("scores"), columns, slowest.slice(0, 64).map((one) => {
    const isSlow = one.score !== null && one.score < 0.9;
    return [el("span", {}, isSlow ? el("span", { class: "badtext", title: t("slow") }, "▲ ") : null, String(one.rank)), number(one.score, 3), meter(one.score ?? 0, isSlow ? "bad" : "good"), number(one.against_own, 3),
      ...kinds.map((axis) => seconds(answer.waits[axis][answer.ranks.indexOf(one.rank)]))];
  }), { "data-table": "scores" }));
}

function mesh({ axes, places }, run) {
  const hosts = new Map();
  const live = new Map((run.live?.ranks ?? []).map((one) => [one.rank, one]));
  for (const one of places) hosts.set(one.host ?? "", [...(hosts.get(one.host ?? "") ?? []), one]);
  const hang = run.live?.hang?.rank;
  const place = (one) => {
    const now = live.get(one.rank);
    const state = one.rank === hang ? "silent" : now?.state ?? one.state ?? "ended";
    const where = Object.entries(one.coordinates ?? {}).filter(([axis]) => (axes ?? []).some(([name, size]) => name === axis && size > 1));
    const text = where.map(([axis, index]) => `${axis} ${index}`).join(" ");
    return el("li", { class: `place ${state}`, "data-rank": one.rank, title: now ? t("place.says", { phase: now.phase || "–", seconds: seconds(now.phase_seconds), age: seconds(now.heartbeat_age) }) : null },
      el("b", {}, String(one.rank)), el("span", {}, text), el("span", { class: "state" }, state === "running" && now?.phase ? now.phase : has(`state.${state}`) ? t(`state.${state}`) : state));
  };
  const shape = (axes ?? []).map(([name, size]) => `${name} ${size}`).join(" × ");
  const node = card(t("mesh"), el("span", { class: "dim mono" }, shape), el("div", { class: "hosts" }, [...hosts].map(([host, members]) =>
    el("section", { class: "host", "aria-label": host }, el("h3", {}, host || t("this.host")), el("ul", {}, members.map(place))))));
  node.classList.add("mesh");
  return node;
}

function memory(rows) {
  const total = (parts) => PARTS.reduce((sum, part) => sum + (parts?.[part] ?? 0), 0);
  const most = Math.max(...rows.flatMap((row) => [total(row.measured), total(row.predicted)]), 1);
  const bar = (parts, kind) => el("div", { class: `stack ${kind}`, role: "img", "aria-label": PARTS.filter((part) => parts[part]).map((part) => `${t(`part.${part}`)} ${bytes(parts[part])}`).join(", ") },
    PARTS.filter((part) => parts[part]).map((part) => el("span", { class: `part-${part}`, title: `${t(`part.${part}`)} ${bytes(parts[part])}`, style: { width: `${(parts[part] / most) * 100}%` } })));
  const columns = [{ text: t("column.rank"), number: true }, { text: t("measured.predicted") }, { text: t("measured"), number: true }, { text: t("predicted"), number: true }, { text: t("difference"), number: true }];
  return card(t("memory"), el("ul", { class: "legend" }, PARTS.filter((part) => rows.some((row) => row.measured?.[part] || row.predicted?.[part])).map((part) => el("li", {}, el("span", { class: `swatch part-${part}`, "aria-hidden": "true" }), t(`part.${part}`)))),
    table(t("memory"), columns, rows.map((row) => {
      const [had, said] = [row.measured ? total(row.measured) : null, row.predicted ? total(row.predicted) : null];
      return [String(row.rank), el("div", { class: "stacks" }, row.measured ? bar(row.measured, "measured") : null, row.predicted ? bar(row.predicted, "predicted") : null), bytes(had), bytes(said), had && said ? signed(had / said - 1) : "–"];
    }), { "data-table": "memory", class: "plain wide2" }),
    asTable(t("as.table"), () => table(t("memory"), [{ text: t("column.rank"), number: true }, ...PARTS.flatMap((part) => [{ text: `${t(`part.${part}`)} · ${t("measured")}`, number: true }, { text: t("predicted"), number: true }])],
      rows.map((row) => [String(row.rank), ...PARTS.flatMap((part) => [integer(row.measured?.[part]), integer(row.predicted?.[part])])]))));
}

function traffic(rows) {
  const most = Math.max(...rows.map((row) => row.bytes ?? 0), 1);
  const columns = [{ text: t("axis") }, { text: t("operation") }, { text: t("calls"), number: true }, { text: t("bytes"), number: true }, { text: "" }, { text: t("forecast"), number: true }, { text: t("difference"), number: true }, { text: t("time"), number: true }, { text: t("per.second"), number: true }];
  return card(t("traffic"), null, table(t("traffic"), columns, rows.map((row) => {
    const off = row.forecast_bytes ? row.bytes / row.forecast_bytes - 1 : null;
    return [row.axis, row.operation, integer(row.calls), el("span", { title: `${integer(row.bytes)} B`, "data-value": row.bytes }, bytes(row.bytes)), meter((row.bytes ?? 0) / most, "plain"), bytes(row.forecast_bytes), off === null ? "–" : off === 0 ? t("exactly") : signed(off), seconds(row.seconds), row.seconds ? `${bytes(row.bytes / row.seconds)}/s` : "–"];
  }), { "data-table": "traffic" }));
}
