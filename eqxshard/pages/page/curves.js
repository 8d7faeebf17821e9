
// The curves: drawn, with zoom and hover by pointer and by keyboard.
const WIDTH = 1000;
const HEIGHT = 400;
const SVG = "http://www.w3.org/2000/svg";

function element(name, classes, ...children) {
  const made = document.createElement(name);
  made.className = classes;
  made.append(...children);
  return made;
}

function stroke(classes, d) {
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", d);
  path.setAttribute("class", classes);
  return path;
}

function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  // A power that is rounded up may be too large.
  const step = [5, 2, 1, 0.5].map((n) => n * power).find((n) => n <= (high - low) / 3);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
  return found;
}

function label(tick) {
  const size = Math.abs(tick);
  for (const [least, each, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= least) return Number((tick / each).toPrecision(6)) + unit;
  }
  return String(Number(tick.toPrecision(6)));
}

function value(number, isSpeed) {
  if (number === null) return "not finite";
  if (isSpeed) return number.toLocaleString("en", { maximumSignificantDigits: 3 });
  if (Math.abs(number) >= 999.95) return Math.round(number).toLocaleString("en");
  return number.toPrecision(4);
}

function duration(seconds) {
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 7200) return `${Number((seconds / 60).toPrecision(3))} min`;
  return `${Number((seconds / 3600).toPrecision(3))} h`;
}

// What all curves share: the stretch that is shown, null for all, and what it is over.
const view = { over: "step", log: false, range: null, hidden: new Set() };
const charts = [];

// The ends of an axis for some values.
function span(values, margin) {
  let [low, high] = [Infinity, -Infinity];
  for (const each of values) [low, high] = [Math.min(low, each), Math.max(high, each)];
  const room = low < high ? margin * (high - low) : (Math.abs(low) || 1) / 2;
  return [low - room, high + room];
}

function whole() {
  return span(charts.flatMap((chart) => chart.places(true)), 0.015);
}

function drawAll() {
  charts.forEach((chart) => chart.draw());
}

// Zooms by a factor around a place, or shows all.
function zoom(factor, center) {
  const [first, last] = whole();
  const [low, high] = view.range ?? [first, last];
  const middle = center ?? (low + high) / 2;
  const least = (last - first) / 1e4;
  const size = Math.max((high - low) * factor, least);
  if (size >= last - first) view.range = null;
  else {
    const start = Math.min(Math.max(middle - ((middle - low) / (high - low)) * size, first), last - size);
    view.range = [start, start + size];
  }
  drawAll();
}

class Chart {
  constructor(figure, series) {
    this.frame = figure.querySelector(".frame");
    this.plot = figure.querySelector(".plot");
    this.said = figure.querySelector("[aria-live]");
    this.keys = [...figure.querySelectorAll(".key li")];
    this.series = series;
    this.at = null; // The place of the point that is shown.
    this.pressed = null; // Where a stretch to zoom in on begins.
    const on = (name, act) => this.plot.addEventListener(name, act);
    on("pointermove", (event) => this.move(event));
    on("pointerdown", (event) => this.press(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", () => this.cancel());
    on("pointerleave", () => { if (this.pressed === null) this.show(null); });
    on("dblclick", () => { view.range = null; drawAll(); });
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("blur", () => this.show(null));
  }

  xs(series) { return series[view.over]; }

  shown() { return this.series.filter((series) => !view.hidden.has(series.run)); }

  draw() {
    [this.low, this.high] = view.range ?? span(this.places(true), 0.015);
    const usable = (y) => y !== null && (!view.log || y > 0);
    this.map = view.log ? Math.log10 : (y) => y;
    let visible = [];
    for (const series of this.shown()) {
      this.xs(series).forEach((x, i) => {
        const y = series.value[i];
        if (usable(y) && x !== null && x >= this.low && x <= this.high) visible.push(this.map(y));
      });
    }
    if (!visible.length) visible = [0];
    [this.bottom, this.top] = span(visible, 0.06);
    const svg = this.plot.querySelector("svg");
    const shapes = [];
    this.plot.querySelectorAll(".x, .y").forEach((old) => old.remove());
    for (const tick of ticks(this.low, this.high)) {
      const x = this.x(tick);
      shapes.push(stroke("grid", `M${x * WIDTH} 0V${HEIGHT}`));
      const text = element("span", "x", view.over === "seconds" ? duration(tick) : label(tick));
      text.style.left = `${100 * x}%`;
      this.plot.append(text);
    }
    for (const tick of ticks(this.bottom, this.top)) {
      const y = (this.top - tick) / (this.top - this.bottom);
      shapes.push(stroke("grid", `M0 ${y * HEIGHT}H${WIDTH}`));
      const text = element("span", "y", view.log ? String(Number((10 ** tick).toPrecision(2))) : label(tick));
      text.style.top = `${100 * y}%`;
      this.plot.append(text);
    }
    for (const series of this.shown()) {
      let [line, dots, pen] = ["", "", "M"];
      this.xs(series).forEach((x, i) => {
        if (x === null || !usable(series.value[i])) { pen = "M"; return; }
        const place = `${(this.x(x) * WIDTH).toFixed(1)} ${(this.y(series.value[i]) * HEIGHT).toFixed(1)}`;
        line += pen + place;
        if (series.dotted) dots += `M${place}h0`;
        pen = "L";
      });
      shapes.push(stroke(`line ${series.style}`, line));
      if (dots) shapes.push(stroke(`dots ${series.style}`, dots));
    }
    svg.replaceChildren(...shapes);
    this.series.forEach((series, i) => { this.keys[i].hidden = view.hidden.has(series.run); });
    this.show(null);
  }

  x(place) { return (place - this.low) / (this.high - this.low); }

  y(number) { return (this.top - this.map(number)) / (this.top - this.bottom); }

  // The place under the pointer.
  under(event) {
    const box = this.plot.getBoundingClientRect();
    const part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    return this.low + part * (this.high - this.low);
  }

  // The places of all points in order, or of those that are shown.
  places(all = false) {
    const series = all ? this.series : this.shown();
    const known = series.flatMap((each) => this.xs(each)).filter((x) => x !== null);
    const seen = all ? known : known.filter((x) => x >= this.low && x <= this.high);
    return [...new Set(seen)].sort((a, b) => a - b);
  }

  move(event) {
    if (this.pressed !== null) this.choose(this.under(event));
    const place = this.under(event);
    const places = this.places();
    const near = (a, b) => (Math.abs(b - place) < Math.abs(a - place) ? b : a);
    this.show(places.length ? places.reduce(near) : null);
  }

  press(event) {
    if (event.button !== 0) return;
    this.pressed = this.under(event);
    this.plot.setPointerCapture(event.pointerId);
  }

  choose(place) {
    this.choice ??= this.plot.appendChild(element("div", "choice"));
    const [a, b] = [this.x(this.pressed), this.x(place)].sort((p, q) => p - q);
    this.choice.style.left = `${100 * a}%`;
    this.choice.style.width = `${100 * (b - a)}%`;
  }

  release(event) {
    if (this.pressed === null) return;
    const [a, b] = [this.pressed, this.under(event)].sort((p, q) => p - q);
    const wide = (b - a) / (this.high - this.low) > 0.02;
    this.cancel();
    if (wide) { view.range = [a, b]; drawAll(); }
  }

  cancel() {
    this.pressed = null;
    this.choice?.remove();
    this.choice = undefined;
  }

  key(event) {
    const places = this.places();
    const now = places.indexOf(this.at);
    const to = {
      ArrowRight: now + 1,
      ArrowLeft: now < 0 ? places.length - 1 : Math.max(now - 1, 0),
      Home: 0,
      End: places.length - 1,
    }[event.key];
    if (to !== undefined && places.length) this.show(places[Math.min(to, places.length - 1)], true);
    else if (event.key === "+" || event.key === "=") this.zoomHere(0.5);
    else if (event.key === "-") this.zoomHere(2);
    else if (event.key === "Escape") { view.range = null; drawAll(); }
    else return;
    event.preventDefault();
  }

  zoomHere(factor) {
    const at = this.at;
    zoom(factor, at ?? undefined);
    if (at !== null) this.show(at, true);
  }

  // Shows the values at a place; says them, if the keyboard asks.
  show(at, say = false) {
    this.plot.querySelectorAll(".rule, .mark, .tip").forEach((old) => old.remove());
    this.at = at;
    if (at === null) return;
    const rule = this.plot.appendChild(element("div", "rule"));
    rule.style.left = `${100 * this.x(at)}%`;
    const rows = [];
    let title = "";
    for (const series of this.shown()) {
      // Its nearest point, if it is near.
      const xs = this.xs(series);
      let best = -1;
      xs.forEach((x, i) => {
        if (x !== null && (best < 0 || Math.abs(x - at) < Math.abs(xs[best] - at))) best = i;
      });
      if (best < 0 || Math.abs(this.x(xs[best]) - this.x(at)) > 0.02) continue;
      const y = series.value[best];
      if (xs[best] === at || !title) {
        const epoch = series.epoch[best];
        title = `step ${series.step[best].toLocaleString("en")}`;
        if (epoch !== null) title += `, epoch ${Number(epoch.toPrecision(4))}`;
        if (series.seconds[best]) title += `, ${duration(series.seconds[best])}`;
      }
      const name = element("span", "", series.name);
      rows.push(element("div", "", element("span", `stroke ${series.style}`), name, element("span", "value", value(y, series.is_speed))));
      if (y === null || (view.log && y <= 0)) continue;
      const mark = this.plot.appendChild(element("div", `mark ${series.style}`));
      mark.style.left = `${100 * this.x(xs[best])}%`;
      mark.style.top = `${100 * this.y(y)}%`;
    }
    const tip = this.plot.appendChild(element("div", "tip", title, ...rows));
    const room = this.plot.clientWidth - tip.offsetWidth;
    const left = this.x(at) * this.plot.clientWidth;
    const beside = left + 12 > room ? left - 12 - tip.offsetWidth : left + 12;
    tip.style.left = `${Math.min(Math.max(beside, 0), Math.max(room, 0))}px`;
    if (say) this.said.textContent = [title, ...rows.map((row) => row.innerText)].join("; ");
  }
}

const data = document.getElementById("curves-data");
if (data) {
  const found = JSON.parse(data.textContent);
  const figures = document.querySelectorAll(".chart");
  found.forEach((series, i) => charts.push(new Chart(figures[i], series)));
  const controls = document.getElementById("curves-controls");
  const over = controls.querySelector("select");
  const all = found.flat();
  for (const option of [...over.options]) {
    // A run may have no epochs, or no times.
    const known = all.every((series) => series[option.value].some((x) => x));
    if (!known && option.value !== "step") option.remove();
  }
  over.addEventListener("change", () => {
    view.over = over.value;
    view.range = null;
    drawAll();
  });
  const log = controls.querySelector("input");
  log.addEventListener("change", () => { view.log = log.checked; drawAll(); });
  const acts = { in: () => zoom(0.5), out: () => zoom(2), reset: () => zoom(Infinity) };
  for (const button of controls.querySelectorAll("button")) {
    button.addEventListener("click", acts[button.dataset.do]);
  }
  for (const box of document.querySelectorAll("input[data-run]")) {
    box.hidden = false;
    box.addEventListener("change", () => {
      if (box.checked) view.hidden.delete(Number(box.dataset.run));
      else view.hidden.add(Number(box.dataset.run));
      drawAll();
    });
  }
  controls.hidden = false;
  drawAll();
}
