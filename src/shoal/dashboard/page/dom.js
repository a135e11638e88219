// Elements out of values. Text from a run is only ever a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, props, ...children) {
  return fill(document.createElement(name), props, children);
}

export function svg(name, props, ...children) {
  return fill(document.createElementNS(SVG, name), props, children);
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
    else if (key === "value" || key === "checked") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function button(label, onclick, props) {
  return el("button", { type: "button", onclick, ...props }, label);
}

/** Buttons of which one is pressed. */
export function segments(label, options, chosen, onchange) {
  const group = el("div", { class: "segments", role: "group", "aria-label": label });
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

/** A table; cells are strings or nodes, a column that is `number` stands right. */
export function table(caption, columns, rows, props) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", { class: "plain", ...props },
      el("caption", { class: "unseen" }, caption),
      el("thead", {}, el("tr", {}, columns.map((one) => el("th", { scope: "col", class: one.number ? "number" : null }, one.text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, place) =>
        el(place ? "td" : "th", { scope: place ? null : "row", class: columns[place].number ? "number" : null }, cell ?? "–")))))));
}

export function card(title, tools, ...body) {
  return el("section", { class: "card", "aria-label": title },
    el("div", { class: "cardhead" }, el("h2", {}, title), el("div", { class: "tools" }, tools)), body);
}

/** What a picture shows, as a table that opens on demand. */
export function asTable(label, make) {
  const node = el("details", { class: "astable" }, el("summary", {}, label));
  node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(make()); });
  return node;
}

export function empty(text, hint) {
  return el("div", { class: "empty" }, el("p", {}, text), hint ? el("p", { class: "dim" }, hint) : null);
}

let probe = null;
const known = new Map();

/** The colour that a variable of the style sheet has now, as canvas takes it. */
export function colour(name) {
  if (!known.has(name)) {
    probe ??= document.body.appendChild(el("span", { class: "unseen", "aria-hidden": "true" }));
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

export function remember(key, value) {
  try { value === null ? localStorage.removeItem(`shoal.${key}`) : localStorage.setItem(`shoal.${key}`, value); } catch { /* forgotten */ }
}

export function recall(key) {
  try { return localStorage.getItem(`shoal.${key}`); } catch { return null; }
}
