// Decimation of rows to pixels, and axis ticks: pure functions of numbers.

// Return the first index whose time is at least t.
const search = (times, t) => {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < t) low = middle + 1; else high = middle;
  }
  return low;
};
const nearest = (times, t) => {
  const i = search(times, t);
  if (i === 0) return 0;
  return i === times.length || t - times[i - 1] < times[i] - t ? i - 1 : i;
};

// Return one bin per pixel column with a value: its extremes, and its first and last value, which
// connect lines between columns. The rows next to the window are included, so that lines extend
// to the edges of the picture.
const decimate = (times, values, from, to, width) => {
  const bins = [], scale = width / (to - from);
  const begin = Math.max(0, search(times, from) - 1);
  const end = Math.min(times.length, search(times, to) + 1);
  let bin = null, broken = true;
  for (let i = begin; i < end; i++) {
    const value = values[i];
    if (value !== value) { broken = true; continue; }
    const x = (times[i] - from) * scale, column = Math.floor(x);
    if (bin && bin.column === column) {
      if (value < bin.low) bin.low = value;
      if (value > bin.high) bin.high = value;
      bin.last = value;
      bin.count++;
    } else {
      bin = { column, x, low: value, high: value, first: value, last: value, count: 1, broken };
      bins.push(bin);
    }
    broken = false;
  }
  return bins;
};

const SECOND = 1e3, MINUTE = 6e4, HOUR = 36e5, DAY = 864e5;
const STEPS = [
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500],
  ...[1, 2, 5, 10, 15, 30].map(n => n * SECOND), ...[1, 2, 5, 10, 15, 30].map(n => n * MINUTE),
  ...[1, 2, 3, 6, 12].map(n => n * HOUR), ...[1, 2, 7, 14].map(n => n * DAY),
];
const MONTH_STEPS = [1, 2, 3, 6];
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const round = step => {
  const power = 10 ** Math.floor(Math.log10(step));
  return power * ([1, 2, 5, 10].find(n => n * power >= step * (1 - 1e-9)) || 10);
};
const two = n => String(n).padStart(2, "0");
const month = index => {
  const date = new Date(0);
  date.setUTCFullYear(Math.floor(index / 12), ((index % 12) + 12) % 12, 1);
  return date.getTime();
};

const numberTicks = (low, high, count) => {
  const step = round((high - low) / count);
  const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const large = Math.max(Math.abs(low), Math.abs(high));
  const ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) {
    const at = k * step;
    const plain = large >= 1e7 || (large < 1e-4 && large > 0)
      ? Number(at.toPrecision(6)).toExponential() : at.toFixed(decimals);
    ticks.push({ at, label: plain.replace(/^-(?=0*\.?0*$)/, "").replace(/-/g, "−") });
  }
  return ticks;
};

// Add the day or the year to the first tick if no other tick shows it.
const withContext = ticks => {
  if (!ticks.length || ticks.some(tick => /^-?\d+$/.test(tick.label))) return ticks;
  const date = new Date(ticks[0].at), year = date.getUTCFullYear();
  const day = `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
  if (ticks.every(tick => /[:.]/.test(tick.label))) ticks[0].label = `${day} ${ticks[0].label}`;
  else if (!/[:.]/.test(ticks[0].label)) ticks[0].label += ` ${year}`;
  return ticks;
};

const dateTicks = (low, high, count) => {
  const wanted = (high - low) / count, ticks = [];
  if (wanted > 14 * DAY) {
    const months = wanted / (30.44 * DAY);
    const step = MONTH_STEPS.find(n => n >= months) || 12 * Math.max(1, round(months / 12));
    const start = new Date(low);
    let k = Math.ceil((start.getUTCFullYear() * 12 + start.getUTCMonth()) / step);
    for (; month(k * step) <= high; k++) {
      if (month(k * step) < low) continue;
      const rest = (((k * step) % 12) + 12) % 12;
      ticks.push({
        at: month(k * step), label: rest ? MONTHS[rest] : String(Math.floor((k * step) / 12)),
      });
    }
    return withContext(ticks);
  }
  const step = STEPS.find(n => n >= wanted) || 14 * DAY;
  const offset = step >= 7 * DAY ? 4 * DAY : 0; // weeks begin on Mondays
  for (let k = Math.ceil((low - offset) / step); k * step + offset <= high; k++) {
    const at = k * step + offset, date = new Date(at);
    const clock = `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}`;
    let label = `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
    if (at % DAY) {
      label = step >= MINUTE ? clock : `${clock}:${two(date.getUTCSeconds())}`;
      if (step < SECOND) {
        label = `${two(date.getUTCSeconds())}.${String(date.getUTCMilliseconds()).padStart(3, "0")}`;
      }
    }
    ticks.push({ at, label });
  }
  return withContext(ticks);
};

const showNumber = value => value !== value || value === undefined
  ? "–" : String(Number(value.toPrecision(6))).replace(/-/g, "−");

// Format a date with the precision that its axis needs.
const dateShower = times => {
  const parts = unit => times.every(t => t % unit === 0);
  const length = parts(DAY) ? 10 : parts(MINUTE) ? 16 : parts(SECOND) ? 19 : 23;
  return t => new Date(t).toISOString().replace("T", " ").replace("Z", "").slice(0, length);
};
