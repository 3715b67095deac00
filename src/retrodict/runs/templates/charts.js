// Draw the series of the page on canvases that share one time axis. No library, no network.

const $ = id => document.getElementById(id);
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text; // names are never parsed as HTML
  return element;
};

const payload = JSON.parse($("payload").textContent);
const axes = payload.axes.map(axis => axis.values
  ? Float64Array.from(axis.values)
  : Float64Array.from({ length: axis.count }, (_, i) => axis.start + axis.step * i));
const numbers = list => list && Float64Array.from(list, value => value === null ? NaN : value);
// A band with a hollow has two sides, which touch at the centre in rows with one mode.
const decodeBand = band => {
  if (!band) return band;
  const [centre, lower, upper] = [band.centre, band.lower, band.upper].map(numbers);
  const columns = { times: axes[band.axis], centre, lower, upper };
  if (band.hollow) {
    const edge = ends => numbers(ends).map((end, i) => end === end ? end : centre[i]);
    [columns.below, columns.above] = band.hollow.map(edge);
    columns.hollow = band.hollow.map(numbers);
  }
  return columns;
};
const decodePanel = panel => ({
  title: panel.title, smoothed: decodeBand(panel), forecast: decodeBand(panel.forecast),
  observed: numbers(panel.observed), missing: panel.missing.map(i => axes[panel.axis][i]),
  regimes: panel.regimes && { ...panel.regimes, times: axes[panel.regimes.axis] },
});

// ---- one series on the page

const host = $("charts"), range = $("range"), HEIGHT = 210, TOP = 8, BOTTOM = 22;
let panels = [], view = null, pointer = null, waiting = false;

const choose = index => {
  host.replaceChildren();
  const series = payload.series[index];
  panels = series.panels.map(decodePanel);
  const dated = payload.axes[series.panels[0].axis].kind === "date";
  const all = panels.flatMap(p => [p.smoothed, p.forecast]).filter(b => b && b.times.length);
  let from = Math.min(...all.map(b => b.times[0]));
  let to = Math.max(...all.map(b => b.times[b.times.length - 1]));
  if (!all.length) [from, to] = [0, 1];
  const rows = Math.max(2, ...all.map(b => b.times.length));
  const pad = (to - from) * 0.01 || (dated ? DAY : 1);
  const show = dated ? dateShower(panels[0].smoothed.times) : showNumber;
  view = {
    dated, show, low: from - pad, high: to + pad, from: from - pad, to: to + pad,
    least: Math.min(to - from + 2 * pad, 4 * ((to - from || 1) / (rows - 1))),
  };
  for (const panel of panels) {
    const figure = make("figure", "panel"), plot = make("div", "plot");
    panel.canvas = make("canvas");
    panel.canvas.tabIndex = 0;
    panel.canvas.setAttribute("role", "img");
    panel.canvas.setAttribute("aria-label", `${panel.title} over time; keys are named above`);
    panel.tip = make("div", "tip");
    panel.tip.hidden = true;
    plot.append(panel.canvas, panel.tip);
    figure.append(make("figcaption", "", panel.title), plot);
    host.append(figure);
    listen(panel);
  }
  pointer = null;
  showRange();
  draw();
};

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const show = (from, width) => {
  const whole = view.high - view.low;
  width = clamp(width, view.least, whole);
  view.from = clamp(from, view.low, view.high - width);
  view.to = view.from + width;
  if (width > whole * (1 - 1e-9)) [view.from, view.to] = [view.low, view.high];
  showRange();
  drawSoon();
};
const zoom = (factor, about = (view.from + view.to) / 2) => {
  const whole = view.high - view.low, width = view.to - view.from;
  const wanted = clamp(width * factor, view.least, whole);
  show(about - (about - view.from) * (wanted / width), wanted);
};
const pan = share => show(view.from + share * (view.to - view.from), view.to - view.from);
const reset = () => show(view.low, view.high - view.low);

const drawSoon = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { if (waiting) draw(); });
};

const draw = () => {
  waiting = false;
  const style = getComputedStyle(document.documentElement);
  const ink = name => style.getPropertyValue(`--${name}`).trim();
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  for (const panel of panels) measure(panel, font);
  const left = Math.ceil(Math.max(...panels.map(p => p.labelWidth))) + 10;
  for (const panel of panels) paint(panel, left, ink, font);
};

// Show the first and the last row in the window, and store the window as data attributes.
const showRange = () => {
  let first = Infinity, last = -Infinity;
  for (const { times } of panels.flatMap(p => [p.smoothed, p.forecast]).filter(Boolean)) {
    const begin = search(times, view.from), end = search(times, view.to) - 1;
    if (begin > end) continue;
    first = Math.min(first, times[begin]);
    last = Math.max(last, times[end]);
  }
  range.textContent = first <= last
    ? `${view.show(first)} to ${view.show(last)}` : "no rows here";
  Object.assign(host.dataset, { from: view.from, to: view.to });
};

// Compute the visible values, one bin per pixel column, and their range.
const measure = (panel, font) => {
  const { canvas, smoothed, forecast, observed } = panel;
  const width = panel.width = canvas.parentNode.clientWidth, visible = panel.visible = {};
  const take = (band, key) => decimate(band.times, band[key], view.from, view.to, width);
  for (const [name, band] of Object.entries({ smoothed, forecast })) {
    if (!band) continue;
    visible[name] = {};
    for (const key of ["centre", "lower", "upper"]) visible[name][key] = take(band, key);
    if (band.hollow) for (const key of ["below", "above"]) visible[name][key] = take(band, key);
  }
  if (observed) {
    visible.observed = decimate(smoothed.times, observed, view.from, view.to, width);
  }
  const parts = [visible.smoothed, visible.forecast, { observed: visible.observed || [] }];
  const all = parts.flatMap(part => Object.values(part || {}).flat());
  const within = all.filter(bin => bin.x >= 0 && bin.x <= width);
  let low = Infinity, high = -Infinity;
  for (const bin of within.length ? within : all) {
    if (bin.low < low) low = bin.low;
    if (bin.high > high) high = bin.high;
  }
  if (!(low <= high)) [low, high] = [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  Object.assign(panel, { low: low - pad, high: high + pad });
  panel.ticks = numberTicks(panel.low, panel.high, 7);
  const pen = canvas.getContext("2d");
  pen.font = font;
  panel.labelWidth = Math.max(0, ...panel.ticks.map(tick => pen.measureText(tick.label).width));
};

const paint = (panel, left, ink, font) => {
  const { canvas, visible, width } = panel, ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  const pen = canvas.getContext("2d"), right = width - 6, bottom = HEIGHT - BOTTOM;
  pen.scale(ratio, ratio);
  pen.font = font;
  panel.left = left;
  panel.right = right;
  const squeeze = (right - left) / width;
  const X = x => left + x * squeeze; // bins are computed over the whole width
  const T = t => left + (t - view.from) / (view.to - view.from) * (right - left);
  const Y = value => bottom - (value - panel.low) / (panel.high - panel.low) * (bottom - TOP);

  pen.lineWidth = 1;
  pen.strokeStyle = ink("grid");
  pen.fillStyle = ink("soft");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const tick of panel.ticks) {
    line(pen, left, Math.round(Y(tick.at)) + 0.5, right, Math.round(Y(tick.at)) + 0.5);
    pen.fillText(tick.label, left - 6, Y(tick.at));
  }
  pen.textBaseline = "top";
  pen.textAlign = "center";
  const wanted = clamp((right - left) / 95, 2, 9);
  let edge = -Infinity;
  for (const tick of (view.dated ? dateTicks : numberTicks)(view.from, view.to, wanted)) {
    const half = pen.measureText(tick.label).width / 2;
    const mark = Math.round(T(tick.at)) + 0.5, x = clamp(mark, half, width - half);
    line(pen, mark, TOP, mark, bottom + 4);
    if (x - half < edge + 8) continue;
    pen.fillText(tick.label, x, bottom + 7);
    edge = x + half;
  }

  pen.save();
  pen.beginPath();
  pen.rect(left, 0, right - left, bottom + 1);
  pen.clip();
  const shade = (bins, colour) => {
    pen.fillStyle = colour;
    pen.globalAlpha = 0.24;
    pen.beginPath(); // one path, so that overlapping sides are not darker
    if (bins.below) {
      fill(pen, bins.lower, bins.below, X, Y);
      fill(pen, bins.above, bins.upper, X, Y);
    } else fill(pen, bins.lower, bins.upper, X, Y);
    pen.fill();
    pen.globalAlpha = 1;
  };
  const stroke = (bins, colour) => {
    pen.strokeStyle = colour;
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    trace(pen, bins, X, Y);
  };
  if (panel.regimes) shadeRegimes(pen, panel.regimes, T, bottom);
  if (visible.observed) dot(pen, visible.observed, X, Y, ink("observed"), width, true);
  shade(visible.smoothed, ink("smoothed"));
  if (visible.forecast) shade(visible.forecast, ink("forecast"));
  stroke(visible.smoothed.centre, ink("smoothed"));
  if (visible.forecast) stroke(visible.forecast.centre, ink("forecast"));
  if (visible.observed) dot(pen, visible.observed, X, Y, ink("observed"), width, false);
  pen.fillStyle = ink("missing");
  const marks = new Map(), rows = panel.smoothed.times;
  for (const t of panel.missing) {
    if (t < view.from || t > view.to) continue;
    const x = Math.round(T(t));
    marks.set(x, (marks.get(x) || 0) + 1);
  }
  const crowd = (search(rows, view.to) - search(rows, view.from)) / (right - left);
  for (const [x, count] of marks) { // opacity: the missing share of the column
    pen.globalAlpha = clamp(count / crowd, 0.15, 1);
    pen.fillRect(x - 0.75, bottom - 6, 1.5, 6);
  }
  pen.globalAlpha = 1;
  if (pointer !== null) {
    pen.strokeStyle = ink("soft");
    pen.lineWidth = 1;
    line(pen, T(pointer), TOP, T(pointer), bottom);
  }
  pen.restore();
  pen.strokeStyle = ink("line");
  line(pen, left, bottom + 0.5, right, bottom + 0.5);
};

// Shade rows by their most probable regime; rows that share a pixel column are drawn once.
const shadeRegimes = (pen, { times, best, strength }, T, bottom) => {
  const { colours, opacity } = payload.shades, last = times.length - 1;
  const edge = i => last < 1 ? T(times[0]) + (i ? 0.5 : -0.5)
    : i === 0 ? T(1.5 * times[0] - 0.5 * times[1])
    : i > last ? T(1.5 * times[last] - 0.5 * times[last - 1])
    : T((times[i - 1] + times[i]) / 2);
  const begin = Math.max(0, search(times, view.from) - 1);
  const end = Math.min(times.length, search(times, view.to) + 1);
  for (let i = begin; i < end;) {
    const from = edge(i);
    let j = i + 1, sum = strength[i];
    while (j < end && best[j] === best[i] && edge(j) - from < 1) sum += strength[j++];
    pen.fillStyle = colours[best[i] % colours.length];
    pen.globalAlpha = opacity * (sum / (j - i));
    pen.fillRect(from, TOP, edge(j) - from, bottom - TOP);
    i = j;
  }
  pen.globalAlpha = 1;
};

const line = (pen, x0, y0, x1, y1) => {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
};

const trace = (pen, bins, X, Y) => {
  pen.beginPath();
  for (const bin of bins) {
    const x = X(bin.x);
    if (bin.broken) pen.moveTo(x, Y(bin.first)); else pen.lineTo(x, Y(bin.first));
    if (bin.count === 1) {
      if (bin.broken) pen.lineTo(x + 0.5, Y(bin.first)); // makes an isolated value visible
      continue;
    }
    pen.lineTo(x, Y(bin.low));
    pen.lineTo(x, Y(bin.high));
    pen.lineTo(x, Y(bin.last));
  }
  pen.stroke();
};

// Fill between the lowest lower and the highest upper end of each column, run by run.
const fill = (pen, lower, upper, X, Y) => {
  const above = new Map(upper.map(bin => [bin.column, bin.high]));
  let run = [];
  const close = () => {
    pen.moveTo(X(run[0].x), Y(above.get(run[0].column)));
    for (const bin of run) pen.lineTo(X(bin.x), Y(above.get(bin.column)));
    for (const bin of run.reverse()) pen.lineTo(X(bin.x), Y(bin.low));
    pen.closePath();
    run = [];
  };
  for (const bin of lower) {
    if (bin.broken && run.length) close();
    if (above.has(bin.column)) run.push(bin);
  }
  if (run.length) close();
};

// Draw points if there are few; otherwise the extremes of each column, below the band.
const dot = (pen, bins, X, Y, colour, width, below) => {
  const count = bins.reduce((sum, bin) => sum + bin.count, 0), dense = count > width;
  if (dense !== below) return;
  pen.fillStyle = colour;
  if (dense) {
    pen.globalAlpha = 0.45;
    for (const bin of bins) {
      const top = Y(bin.high);
      pen.fillRect(X(bin.x), top, 1, Math.max(1.5, Y(bin.low) - top));
    }
  } else {
    const radius = clamp(0.18 * width / Math.max(1, count), 1.1, 2.6);
    for (const bin of bins) {
      for (const value of bin.count === 1 ? [bin.low] : [bin.low, bin.high]) {
        pen.beginPath();
        pen.arc(X(bin.x), Y(value), radius, 0, 7);
        pen.fill();
      }
    }
  }
  pen.globalAlpha = 1;
};

// ---- pointer, wheel, fingers, keys

const timeAt = (panel, event) => {
  const x = event.clientX - panel.canvas.getBoundingClientRect().left;
  const share = clamp((x - panel.left) / (panel.right - panel.left), 0, 1);
  return view.from + share * (view.to - view.from);
};

const point = (panel, event) => {
  const { smoothed, forecast, observed, tip } = panel, t = timeAt(panel, event);
  let band = smoothed, i = nearest(smoothed.times, t), kind = "smoothed";
  if (forecast && forecast.times.length) {
    const j = nearest(forecast.times, t);
    if (!smoothed.times.length
      || Math.abs(forecast.times[j] - t) < Math.abs(smoothed.times[i] - t)) {
      [band, i, kind] = [forecast, j, "forecast"];
    }
  }
  if (!band.times.length) return;
  pointer = band.times[i];
  const rows = [[payload.level, `${showNumber(band.lower[i])} to ${showNumber(band.upper[i])}`]];
  if (band.centre[i] === band.centre[i]) rows.unshift([kind, showNumber(band.centre[i])]);
  const hollow = band.hollow && band.hollow.map(ends => ends[i]);
  if (hollow && hollow[0] === hollow[0]) {
    rows.push(["hardly any", `${showNumber(hollow[0])} to ${showNumber(hollow[1])}`]);
  }
  if (panel.regimes) {
    const j = nearest(panel.regimes.times, pointer), count = panel.regimes.best[j] + 1;
    rows.push(["most probable", `regime ${count}`]);
  }
  if (observed && kind === "smoothed") {
    rows.unshift(["observed", observed[i] === observed[i] ? showNumber(observed[i]) : "missing"]);
  }
  tip.replaceChildren(make("b", "", view.show(pointer)));
  for (const [name, value] of rows) {
    const row = make("div");
    row.append(make("span", "", name), make("span", "", value));
    tip.append(row);
  }
  for (const other of panels) other.tip.hidden = other !== panel;
  const x = panel.left + (pointer - view.from) / (view.to - view.from) * (panel.right - panel.left);
  const room = panel.width - tip.offsetWidth;
  const beside = x + 12 <= room ? x + 12 : x - 12 - tip.offsetWidth;
  tip.style.left = `${clamp(beside, 0, Math.max(0, room))}px`;
  drawSoon();
};

const leave = () => {
  pointer = null;
  for (const panel of panels) panel.tip.hidden = true;
  drawSoon();
};

const listen = panel => {
  const { canvas } = panel, down = new Map();
  const share = pixels => pixels / (panel.right - panel.left);
  canvas.addEventListener("wheel", event => {
    const unit = event.deltaMode === 1 ? 30 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan(share((event.deltaX || event.deltaY) * unit));
      return;
    }
    // Everything is visible: let the page scroll.
    if (event.deltaY > 0 && view.from === view.low && view.to === view.high) return;
    event.preventDefault();
    zoom(Math.exp(clamp(event.deltaY * unit * 0.002, -0.5, 0.5)), timeAt(panel, event));
    point(panel, event);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    down.set(event.pointerId, event);
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", event => {
    const before = down.get(event.pointerId);
    if (before && down.size === 1) {
      pan(-share(event.clientX - before.clientX));
    } else if (before && down.size === 2) {
      const other = [...down.values()].find(held => held.pointerId !== event.pointerId);
      const apart = held => Math.max(12, Math.abs(held.clientX - other.clientX));
      zoom(apart(before) / apart(event), timeAt(panel, other));
    }
    if (before) down.set(event.pointerId, event);
    point(panel, event);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, event => {
      down.delete(event.pointerId);
      if (!down.size) canvas.classList.remove("held");
    });
  }
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("keydown", event => {
    const acts = {
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "−": () => zoom(1 / 0.7),
      ArrowUp: () => zoom(0.7), ArrowDown: () => zoom(1 / 0.7),
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), 0: reset, Escape: leave,
    };
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
};

// ---- start

const select = $("series");
if (select) select.addEventListener("change", () => choose(Number(select.value)));
const buttons = {
  "zoom-in": () => zoom(0.6), "zoom-out": () => zoom(1 / 0.6), earlier: () => pan(-0.3),
  later: () => pan(0.3), reset,
};
for (const [id, act] of Object.entries(buttons)) $(id).addEventListener("click", act);
new ResizeObserver(drawSoon).observe(host);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
// Print on white, also in dark mode.
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printing");
  draw();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  draw();
});
globalThis.retrodict = { decimate, dateTicks, numberTicks };
choose(0);
