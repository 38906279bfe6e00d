// Draws a profile, which stands in the page as JSON. Nothing is fetched.
"use strict";

const profile = JSON.parse(document.getElementById("data").textContent);
const steps = Math.max(profile.steps, 1);
const kernels = profile.kernels;
const total = kernels.reduce((sum, kernel) => sum + kernel.seconds, 0) || 1;
const byId = (id) => document.getElementById(id);
const colour = (category) => `var(--${category.replaceAll(" ", "-")}, var(--other))`;

// ---- Text -----------------------------------------------------------------------------------------------------------

function significant(value, digits = 3) {
  if (!value) return "0";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (seconds >= 1) return `${significant(seconds)} s`;
  return seconds >= 1e-3 ? `${significant(seconds * 1e3)} ms` : `${significant(seconds * 1e6)} us`;
}

function scaled(value, unit) {
  const names = ["", "K", "M", "G", "T", "P"];
  let place = 0;
  while (value >= 1000 && place < names.length - 1) {
    value /= 1000;
    ++place;
  }
  return `${significant(value)} ${names[place]}${unit}`;
}

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function showTip(target, text) {
  const tip = byId("tip");
  target.addEventListener("pointermove", (event) => {
    tip.textContent = text();
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 14;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : below}px`;
  });
  target.addEventListener("pointerleave", () => (tip.hidden = true));
}

const each = (kernel) => kernel.own_seconds / kernel.calls;

function describe(kernel) {
  const lines = [kernel.name, `${duration(kernel.seconds / steps)} a step, ${percent(kernel.seconds / total, 1)}`];
  if (kernel.module) lines.push(`in ${kernel.module}`);
  lines.push(`${significant(kernel.calls / steps)} calls a step, ${duration(each(kernel))} each`);
  if (kernel.flop) lines.push(`${scaled(kernel.flop / each(kernel), "FLOP/s")}, ${significant(kernel.flop / kernel.bytes)} a byte`);
  if (kernel.bytes) lines.push(scaled(kernel.bytes / each(kernel), "B/s"));
  if (kernel.share_of_roof !== null) lines.push(`${percent(kernel.share_of_roof)} of its roof, bound by ${kernel.bound}`);
  return lines.join("\n");
}

// ---- Head -----------------------------------------------------------------------------------------------------------

function drawHead() {
  document.title = `${profile.title || "profile"} - xopt profile`;
  byId("title").textContent = profile.title || "Profile";
  const machine = profile.machine;
  const about = [machine.cpu, `${profile.threads} thread${profile.threads === 1 ? "" : "s"}`, `level ${machine.level}`, `torch ${machine.torch}`, `xopt ${machine.xopt}`];
  byId("machine").textContent = about.filter(Boolean).join(", ");
  const figures = profile.figures;
  const tiles = [["a step, profiler on", duration(figures.wall_seconds / steps)]];
  if (figures.plain_seconds !== null) tiles.push(["a step, profiler off", duration(figures.plain_seconds)]);
  if (figures.busy_share !== null) tiles.push(["of it in kernels", percent(figures.busy_share)]);
  tiles.push(["operations a step", scaled(figures.flop, "FLOP")]);
  tiles.push(["over a step", scaled(figures.flop / (figures.plain_seconds ?? figures.wall_seconds / steps), "FLOP/s")]);
  if (figures.thread_efficiency !== null) tiles.push(["of their regions, threads work", percent(figures.thread_efficiency)]);
  tiles.push(["page faults a step", significant(profile.memory.page_faults)]);
  if (profile.memory.allocated_bytes !== null) tiles.push(["allocated a step", scaled(profile.memory.allocated_bytes, "B")]);
  for (const [what, value] of tiles) byId("tiles").append(element("div", { class: "tile" }, element("b", {}, value), element("span", {}, what)));
  for (const text of [...profile.findings, ...profile.notes]) {
    const item = element("li");
    text.split("`").forEach((part, place) => item.append(place % 2 ? element("code", {}, part) : part));
    byId("findings").append(item);
  }
}

function drawCategories() {
  const found = Object.entries(profile.categories).sort((a, b) => b[1].seconds - a[1].seconds);
  for (const [name, category] of found) {
    const share = category.seconds / total;
    const part = element("div", { style: `width:${100 * share}%;background:${colour(name)}` });
    const calls = category.calls ? `\n${significant(category.calls / steps)} calls a step` : "";
    showTip(part, () => `${name}\n${duration(category.seconds / steps)} a step, ${percent(share, 1)}${calls}`);
    byId("categories").append(part);
    const dot = element("span", { class: "dot", style: `background:${colour(name)}` });
    byId("legend").append(element("span", {}, dot, `${name} ${percent(share, 1)}, ${duration(category.seconds / steps)}`));
  }
}

// ---- Roofline -------------------------------------------------------------------------------------------------------

const logarithmic = (low, high, from, to) => (value) => from + ((Math.log10(value) - low) / (high - low)) * (to - from);
const decades = (low, high) => Array.from({ length: high - low + 1 }, (_, place) => low + place);
const radius = (kernel) => 3 + 22 * Math.sqrt(kernel.seconds / total);

function drawRoofline() {
  const computing = kernels.filter((kernel) => kernel.flop && kernel.bytes && kernel.own_seconds);
  const working = (kernel) => kernel.bytes && kernel.operator && kernel.category !== "allocation" && kernel.own_seconds;
  const moving = kernels.filter((kernel) => !kernel.flop && working(kernel));
  const [width, height, left, right, top, bottom] = [1220, 440, 64, 900, 14, 396];
  const svg = shape(byId("roofline"), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Roofline" });
  const peaks = Object.entries(profile.roofs).filter(([kind]) => kind !== "read" && kind !== "copy");
  const shown = peaks.filter(([kind]) => computing.some((kernel) => roofOf(kernel) === kind));
  const rates = [...computing.map((kernel) => kernel.flop / each(kernel)), ...shown.map(([, peak]) => peak)];
  const intensities = computing.map((kernel) => kernel.flop / kernel.bytes);
  const [xLow, xHigh] = [Math.floor(Math.log10(Math.min(0.5, ...intensities))), Math.ceil(Math.log10(Math.max(200, ...intensities)))];
  const [yLow, yHigh] = [Math.floor(Math.log10(Math.min(1e10, ...rates))), Math.ceil(Math.log10(Math.max(1e11, ...rates)) + 0.05)];
  const [x, y] = [logarithmic(xLow, xHigh, left, right), logarithmic(yLow, yHigh, bottom, top)];
  for (const power of decades(xLow, xHigh)) {
    shape(svg, "line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: top, y2: bottom });
    shape(svg, "text", { x: x(10 ** power), y: bottom + 16, "text-anchor": "middle" }, significant(10 ** power));
  }
  for (const power of decades(yLow, yHigh)) {
    shape(svg, "line", { class: "grid", x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power) });
    shape(svg, "text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, scaled(10 ** power, ""));
  }
  shape(svg, "text", { x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, "operations a byte");
  shape(svg, "text", { x: 12, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }, "operations a second");
  for (const [kind, peak] of shown) {
    const ridge = peak / profile.roofs.read;
    const start = Math.max(10 ** xLow, 10 ** yLow / profile.roofs.read);
    const points = [[start, start * profile.roofs.read], [ridge, peak], [10 ** xHigh, peak]];
    shape(svg, "polyline", { class: "roof", points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") });
    shape(svg, "text", { class: "roof-name", x: right - 6, y: y(peak) - 6, "text-anchor": "end" }, `${kind} ${scaled(peak, "FLOP/s")}`);
  }
  if (shown.length) {
    const middle = Math.sqrt(Math.max(10 ** xLow, 10 ** yLow / profile.roofs.read) * (shown[0][1] / profile.roofs.read));
    const place = { x: x(middle) + 10, y: y(middle * profile.roofs.read) + 14 };
    shape(svg, "text", { class: "roof-name", ...place }, `reading memory, ${scaled(profile.roofs.read, "B/s")}`);
  }
  for (const kernel of [...computing].sort((a, b) => b.seconds - a.seconds)) {
    addPoint(svg, kernel, x(kernel.flop / kernel.bytes), y(kernel.flop / each(kernel)));
  }
  drawBandwidth(svg, moving, 990, 1200, top, bottom);
}

function roofOf(kernel) {
  return kernel.dtype === "bf16" ? "bf16" : kernel.dtype === "s8" || kernel.dtype === "u8" ? "int8" : "f32";
}

function drawBandwidth(svg, moving, left, right, top, bottom) {
  const rates = moving.map((kernel) => kernel.bytes / each(kernel));
  const roofs = ["read", "copy"].filter((kind) => profile.roofs[kind]);
  const highest = Math.max(1e10, ...rates, ...roofs.map((kind) => profile.roofs[kind]));
  const [low, high] = [Math.floor(Math.log10(Math.min(1e8, ...rates))), Math.ceil(Math.log10(highest) + 0.05)];
  const y = logarithmic(low, high, bottom, top);
  for (const power of decades(low, high)) {
    shape(svg, "line", { class: "grid", x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power) });
    shape(svg, "text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, scaled(10 ** power, "B/s"));
  }
  shape(svg, "text", { x: (left + right) / 2, y: bottom + 16, "text-anchor": "middle" }, "bytes a second");
  for (const kind of roofs) {
    shape(svg, "line", { class: "roof", x1: left, x2: right, y1: y(profile.roofs[kind]), y2: y(profile.roofs[kind]) });
  }
  const names = [...new Set(moving.map((kernel) => kernel.category))];
  for (const kernel of moving) {
    const at = left + ((names.indexOf(kernel.category) + 0.5) / names.length) * (right - left);
    addPoint(svg, kernel, at, y(kernel.bytes / each(kernel)));
  }
  for (const kind of roofs) {
    const place = { x: right, y: y(profile.roofs[kind]) + (kind === "read" ? -5 : 13), "text-anchor": "end" };
    shape(svg, "text", { class: "roof-name", ...place }, `${kind} ${scaled(profile.roofs[kind], "B/s")}`);
  }
}

function addPoint(svg, kernel, x, y) {
  const style = `fill:${colour(kernel.category)};stroke:${colour(kernel.category)}`;
  showTip(shape(svg, "circle", { class: "point", cx: x, cy: y, r: radius(kernel), style }), () => describe(kernel));
}

// ---- Timeline -------------------------------------------------------------------------------------------------------

function drawTimeline() {
  const step = profile.shown_step;
  const pieces = profile.timeline;
  const end = profile.step_seconds[step] * 1e6 || 1;
  const threads = [...new Set(pieces.map((piece) => piece[3]))];
  const [width, left, lane] = [1220, 64, 40];
  const height = threads.length * lane + 30;
  const svg = shape(byId("timeline"), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Timeline" });
  let [from, to] = [0, end];
  const draw = () => {
    svg.replaceChildren();
    const x = (time) => left + ((time - from) / (to - from)) * (width - left);
    for (let tick = 0; tick <= 8; ++tick) {
      const time = from + ((to - from) * tick) / 8;
      shape(svg, "line", { class: "grid", x1: x(time), x2: x(time), y1: 0, y2: height - 24 });
      shape(svg, "text", { x: x(time), y: height - 8, "text-anchor": tick === 8 ? "end" : "middle" }, duration(time / 1e6));
    }
    threads.forEach((thread, place) => {
      shape(svg, "text", { x: 4, y: place * lane + lane / 2 + 4 }, `thread ${place + 1}`);
    });
    let last = new Map();
    for (const [, start, length, thread, name, category] of pieces) {
      if (start + length < from || start > to) continue;
      const [begin, stop] = [Math.max(x(start), left), Math.min(x(start + length), width)];
      if (stop - begin < 0.3 && (last.get(thread) ?? -1) > begin - 0.3) continue; // it would not be seen
      last.set(thread, stop);
      const box = { x: begin, y: threads.indexOf(thread) * lane + 4, width: Math.max(stop - begin, 0.5), height: lane - 10 };
      const bar = shape(svg, "rect", { ...box, style: `fill:${colour(category)}` });
      showTip(bar, () => `${name}\n${category}\n${duration(length / 1e6)}`);
    }
  };
  const timeAt = (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    return from + ((place - left) / (width - left)) * (to - from);
  };
  const show = (begin, stop) => {
    const span = Math.min(Math.max(stop - begin, 1), end);
    from = Math.min(Math.max(begin, 0), end - span);
    to = from + span;
    draw();
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [time, factor] = [timeAt(event), event.deltaY > 0 ? 1.25 : 0.8];
    show(time - (time - from) * factor, time + (to - time) * factor);
  }, { passive: false });
  let held = null;
  svg.addEventListener("pointerdown", (event) => (held = timeAt(event)));
  addEventListener("pointerup", () => (held = null));
  svg.addEventListener("pointermove", (event) => {
    if (held === null) return;
    const shift = held - timeAt(event);
    show(from + shift, to + shift);
  });
  svg.addEventListener("dblclick", () => show(0, end));
  draw();
}

// ---- Table ----------------------------------------------------------------------------------------------------------

const COLUMNS = [
  ["kernel", (kernel) => kernel.name, null, "text name"],
  ["module", (kernel) => kernel.module ?? "", null, "text path"],
  ["category", (kernel) => kernel.category, null, "text"],
  ["time", (kernel) => kernel.seconds / steps, duration],
  ["share", (kernel) => kernel.seconds / (kernel.total ?? total), (value) => percent(value, 1)],
  ["calls", (kernel) => (kernel.operator ? kernel.calls / steps : null), significant],
  ["each", (kernel) => (kernel.operator ? each(kernel) : null), duration],
  ["FLOP", (kernel) => kernel.flop || null, (value) => scaled(value, "")],
  ["bytes", (kernel) => (kernel.operator && kernel.bytes) || null, (value) => scaled(value, "")],
  ["FLOP/s", (kernel) => (kernel.flop ? kernel.flop / each(kernel) : null), (value) => scaled(value, "")],
  ["B/s", (kernel) => (kernel.bytes && kernel.operator ? kernel.bytes / each(kernel) : null), (value) => scaled(value, "")],
  ["FLOP/B", (kernel) => (kernel.flop ? kernel.flop / kernel.bytes : null), significant],
  ["of roof", (kernel) => kernel.share_of_roof, percent],
  ["bound", (kernel) => kernel.bound, null, "text"],
  ["threads", (kernel) => kernel.thread_efficiency, percent],
];

function drawTable() {
  const [head, body] = [byId("kernels").tHead, byId("kernels").tBodies[0]];
  let [sorted, ascending] = [3, false];
  const row = element("tr");
  COLUMNS.forEach(([name, , , kind], place) => {
    const cell = element("th", { class: kind ?? "", scope: "col" }, name);
    cell.addEventListener("click", () => {
      ascending = sorted === place ? !ascending : kind !== undefined;
      sorted = place;
      fill();
    });
    row.append(cell);
  });
  head.append(row);
  const fill = () => {
    const wanted = byId("filter").value.toLowerCase();
    const value = COLUMNS[sorted][1];
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? -1) - (b ?? -1));
    const found = kernels.filter((kernel) => `${kernel.name} ${kernel.module} ${kernel.category}`.toLowerCase().includes(wanted));
    found.sort((a, b) => compare(value(a), value(b)) * (ascending ? 1 : -1));
    [...row.children].forEach((cell, place) => {
      if (place === sorted) cell.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    body.replaceChildren(...found.map(tableRow));
    byId("count").textContent = `${found.length} of ${kernels.length}`;
  };
  byId("filter").addEventListener("input", fill);
  fill();
}

function tableRow(kernel) {
  const made = element("tr");
  COLUMNS.forEach(([name, value, format, kind]) => {
    const content = value(kernel);
    const cell = element("td", { class: kind ?? "" });
    if (name === "category") cell.append(element("span", { class: "dot", style: `background:${colour(content)}` }));
    if (name === "share") cell.append(element("span", { class: "bar", style: `width:${60 * content}px` }));
    cell.append(content === null || content === undefined ? "" : format ? format(content) : content);
    made.append(cell);
  });
  return made;
}

// ---- Other devices --------------------------------------------------------------------------------------------------

function drawDevices() {
  for (const [name, device] of Object.entries(profile.devices)) {
    byId("devices").hidden = false;
    const busy = device.busy_share === null ? "" : `, busy ${percent(device.busy_share)} of a step`;
    const body = element("tbody");
    const sum = device.kernels.reduce((seconds, kernel) => seconds + kernel.seconds, 0) || 1;
    for (const kernel of device.kernels) body.append(tableRow({ ...kernel, total: sum }));
    const cells = COLUMNS.map(([header, , , kind]) => element("th", { class: kind ?? "", scope: "col" }, header));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...cells)), body);
    byId("devices").append(element("h3", {}, `${name} (${device.name})${busy}`), element("div", { class: "wide" }, table));
  }
}

// ---- Modules --------------------------------------------------------------------------------------------------------

function drawModules() {
  const root = { path: "", inner: new Map(), seconds: 0, kind: profile.modules[""]?.kind ?? profile.title };
  for (const [path, module] of Object.entries(profile.modules)) {
    let node = root;
    node.seconds += module.seconds;
    for (const part of path ? path.split(".") : []) {
      if (!node.inner.has(part)) node.inner.set(part, { path: part, inner: new Map(), seconds: 0, kind: "" });
      node = node.inner.get(part);
      node.seconds += module.seconds;
    }
    if (node !== root) node.kind = module.kind;
  }
  byId("modules").append(moduleNode(root, 0));
}

function moduleNode(node, depth) {
  const share = node.seconds / total;
  const line = [
    element("span", {}, node.path || profile.title || "model"),
    element("span", { class: "quiet" }, node.path ? node.kind : ""),
    element("span", { class: "amount" }, `${percent(share, 1)}  ${duration(node.seconds / steps)}`),
  ];
  const style = `background:rgba(var(--heat), ${Math.min(0.4, share * 0.5).toFixed(3)})`;
  if (!node.inner.size) return element("div", { class: "leaf", style }, ...line);
  const made = element("details", {}, element("summary", { style }, ...line));
  made.open = depth < 2 && node.inner.size < 30;
  const inner = [...node.inner.values()];
  if (inner.some((each) => Number.isNaN(Number(each.path)))) inner.sort((a, b) => b.seconds - a.seconds);
  made.append(...inner.map((each) => moduleNode(each, depth + 1)));
  return made;
}

// ---- All of it ------------------------------------------------------------------------------------------------------

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

chooseTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => chooseTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
drawHead();
drawCategories();
drawRoofline();
drawTimeline();
drawTable();
drawDevices();
drawModules();
document.body.dataset.drawn = "yes";
