// One run: what it is and how it stands, and its tabs.
import { button, el, empty, replace } from "../dom.js";
import { age, bytes, clock, compact, exact, integer, number, seconds } from "../format.js";
import { get } from "../net.js";
import { said, t } from "../words.js";
import { agreement } from "./agreement.js";
import { pill } from "./overview.js";
import { ranks } from "./ranks.js";
import { journal } from "./story.js";
import { timeline } from "./timeline.js";
import { wall } from "./wall.js";

const TABS = {
  curves: (app, run, place) => wall(app, { runs: [{ id: run.id, label: run.name }], curves: run.curves, ranks: (run.ranks ?? []).map((one) => one.rank), query: place.query, onquery: place.onquery }),
  timeline, ranks, agreement, story: journal,
};

export function run(app, [id, chosen = "curves"], query) {
  const head = el("div", { class: "runhead" });
  const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": t("views") });
  const panel = el("div", { class: "panel", role: "tabpanel", id: "panel", tabindex: -1 });
  const node = el("div", { class: "run" }, head, tabs, panel);
  let header = null, tab = null, name = chosen in TABS ? chosen : "curves", refreshing = 0, refreshedAt = 0;

  function place(query) {
    return { query, onquery: (values) => {
      const text = new URLSearchParams(values).toString();
      app.go(`/run/${id}/${name}${text ? `?${text}` : ""}`, { quietly: true });
    } };
  }

  function show(query) {
    tab?.end?.();
    replace(tabs, Object.keys(TABS).map((one, number) => el("a", { role: "tab", id: `tab-${one}`, href: `#/run/${id}/${one}`, "aria-selected": String(one === name), "aria-controls": "panel", title: String(number + 1) }, t(`tab.${one}`))));
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    tab = TABS[name](app, header, place(query));
    replace(panel, tab.node);
  }

  async function load(first) {
    refreshedAt = Date.now();
    header = await get(`run/${id}`);
    if (!app.rows.has(id)) app.rows.set(id, header);
    summary();
    if (first) show(query); else tab?.header?.(header);
  }

  function summary() {
    const row = { ...header, ...app.rows.get(id) };
    app.crumbs([row.name, null]);
    replace(head, title(row), blamed(row, header.live), facts(app, row, header), broken(header), commands(row, header.live));
  }

  load(true).catch((error) => replace(node, empty(error.status === 404 ? t("no.run") : error.message, t("no.run.hint"))));
  return {
    node,
    end: () => { clearTimeout(refreshing); tab?.end?.(); },
    moved(parts, query) {
      if (parts[0] !== "run" || parts[1] !== id || !header) return false;
      name = parts[2] in TABS ? parts[2] : "curves";
      show(query);
      return true;
    },
    rows(changed) {
      if (!header || (changed && !changed.some((one) => one.id === id))) return;
      if (header.name !== undefined) summary();
      tab?.changed?.();
      // What is not in the row (live state, generations, logs) is asked for at most every two seconds.
      clearTimeout(refreshing);
      refreshing = setTimeout(() => load(false).catch(() => {}), Math.max(0, 2000 - (Date.now() - refreshedAt)));
    },
    points(value) { if (value.id === id) tab?.points?.(value); },
    again() { load(false).then(() => tab?.again?.()).catch((error) => app.note(error.message)); },
    tick() {
      for (const one of head.querySelectorAll("time")) one.textContent = age(app.now() - Number(one.dataset.t));
      tab?.tick?.();
    },
    key(event) {
      const wanted = Object.keys(TABS)[Number(event.key) - 1];
      if (wanted) app.go(`/run/${id}/${wanted}`);
      else return tab?.key?.(event) ?? false;
      return true;
    },
  };
}

function title(row) {
  return el("div", { class: "title" }, el("h1", {}, row.name), pill(row.status), el("span", { class: "kind" }, t(`kind.${row.kind}`)),
    row.proof === "ok" ? el("span", { class: "mark good" }, "✓ ", t("proved")) : row.proof === "failed" ? el("span", { class: "mark bad" }, "✕ ", t("refuted")) : null);
}

/** Who is to blame where the run failed or stands still. */
function blamed(row, live) {
  const hang = row.status === "running" || row.status === "silent" ? live?.hang : null;
  if (hang) {
    const host = live.ranks?.find((one) => one.rank === hang.rank)?.host;
    return el("div", { class: "blame", role: "alert" }, el("b", {}, t("hangs", { rank: hang.rank ?? hang.name, phase: hang.phase, seconds: seconds(hang.seconds) })), host ? el("span", { class: "dim" }, ` ${t("on.host", { host })}`) : null);
  }
  const one = row.culprit;
  if (!one) return null;
  return el("div", { class: "blame", role: "alert" }, el("b", {}, t("culprit", { rank: one.rank ?? "–", host: one.host || "–", phase: one.phase || "–" })), " ", el("span", {}, said(one.cause ?? "", one.words)));
}

function facts(app, row, header) {
  const entries = [
    ["step", [integer(row.step), row.total_steps ? el("span", { class: "dim" }, ` / ${integer(row.total_steps)}`) : null]],
    ["loss", number(row.loss), exact(row.loss)],
    ["validation_loss", number(row.validation_loss), exact(row.validation_loss)],
    ["tokens_per_s", compact(row.tokens_per_s), exact(row.tokens_per_s)],
    ["step_seconds", seconds(row.step_seconds), exact(row.step_seconds)],
    ["memory", bytes(row.memory_bytes), exact(row.memory_bytes)],
    ["ranks", integer(row.world_size)],
    row.eta_s === null || row.eta_s === undefined ? null : ["eta", seconds(row.eta_s)],
    ["started", clock(row.started)],
    ["updated", el("time", { "data-t": row.updated, title: clock(row.updated) }, age(app.now() - row.updated))],
    header.generations?.length > 1 ? ["generations", integer(header.generations.length)] : null,
    row.hash ? ["hash", el("span", { class: "mono", title: row.hash }, row.hash.slice(0, 12))] : null,
  ].filter(Boolean);
  return [el("dl", { class: "facts" }, entries.map(([key, value, title]) => el("div", { "data-fact": key, title: title ?? null }, el("dt", {}, t(`column.${key}`)), el("dd", {}, value)))),
    el("p", { class: "planline mono" }, typeof row.plan === "string" ? row.plan : row.plan?.text ?? "")];
}

function broken(header) {
  const kinds = Object.entries(header.unknown_kinds ?? {});
  if (!header.broken_lines && !kinds.length) return null;
  return el("p", { class: "warn" }, [header.broken_lines ? t("broken.lines", { count: integer(header.broken_lines) }) : null,
    kinds.length ? t("unknown.kinds", { kinds: kinds.map(([kind, count]) => `${kind} (${count})`).join(", ") }) : null].filter(Boolean).join(" "));
}

/** The page is read-only: what one would press is a command to copy. */
function commands(row, live) {
  const name = /^[\w./-]+$/.test(row.name) ? row.name : `'${row.name.replaceAll("'", "'\\''")}'`;
  const entries = row.status === "running" || row.status === "silent"
    ? [live?.pid ? ["stop", `kill -TERM ${live.pid}`] : null, ["top", `shoal top ${name}`],
      live?.hang && live.ranks ? ["stacks", `kill -USR1 ${live.ranks.find((one) => one.rank === live.hang.rank)?.pid ?? live.pid}`] : null]
    : [["report", `shoal report ${name} --html report.html`], row.status === "completed" ? null : ["resume", "shoal train RECIPE --resume --run-dir " + name]];
  const details = el("details", { class: "commands" }, el("summary", {}, t("commands")), el("p", { class: "dim" }, t("commands.why", { host: live?.host || "–" })),
    el("ul", {}, entries.filter(Boolean).map(([key, text]) => el("li", {}, el("span", {}, t(`command.${key}`)), el("code", {}, text), copier(text)))));
  details.open = commands.isOpen ?? false;
  details.addEventListener("toggle", () => { commands.isOpen = details.open; });
  return details;
}

export function copier(text) {
  const node = button(t("copy"), async () => {
    try { await navigator.clipboard.writeText(text); node.textContent = t("copied"); } catch { getSelection().selectAllChildren(node.previousSibling); }
  }, { class: "quiet", "aria-label": `${t("copy")}: ${text}` });
  return node;
}
