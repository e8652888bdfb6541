// The kinds of panels. Each function returns data, series and scales for uPlot, the legend for a
// step, and the columns of the table of values.

const FEW = 40; // with fewer steps, lines have points and areas have edges

// ---- Lines ----

function linesChart(panel) {
  const all = new Set();
  for (const line of panel.lines) {
    line.steps.forEach((step) => all.add(step));
    if (line.band) line.band.steps.forEach((step) => all.add(step));
  }
  const steps = [...all].sort((a, b) => a - b);
  const aligned = (own, values) => {
    const known = new Map(own.map((step, index) => [step, values[index]]));
    return steps.map((step) => known.get(step) ?? null);
  };
  const data = [steps];
  const series = [];
  const bands = [];
  const add = (values, style) => {
    data.push(values);
    series.push({ spanGaps: true, ...style });
    return data.length - 1;
  };
  const shown = panel.lines.map((line, order) => {
    const index = line.place ?? order; // a run keeps its color in all charts
    const stroke = () => lineColor(index);
    const points = { show: line.steps.length < FEW, size: 6, fill: stroke };
    const dash = lineDash(index);
    const band = line.band && [line.band.low, line.band.high];
    const ends = band?.map((values) => aligned(line.band.steps, values));
    if (ends) {
      const none = { stroke: 'transparent', points: { show: false } };
      const [low, high] = ends.map((values) => add(values, none));
      bands.push({ series: [high, low], fill: () => `${lineColor(index)}2b` });
    }
    const values = aligned(line.steps, line.values);
    if (line.smooth) {
      add(values, { stroke: () => `${lineColor(index)}55`, width: 1, points: { show: false } });
      const alone = { ...points, show: line.steps.length === 1 };
      add(aligned(line.steps, line.smooth), { stroke, width: 2, dash, points: alone });
    } else {
      add(values, { stroke, width: 2, dash, points });
    }
    return { label: line.label, values, ends, index };
  });
  const legend = (at) => [
    whereAt(panel, steps[at]),
    ...shown.map(({ label, values, ends, index }) => {
      const [low, high] = (ends || []).map((end) => end[at]);
      const range = interval(low, high);
      return keyOf(sample(index), label, values[at], range && ` (${range})`);
    }),
  ];
  return {
    data,
    series,
    bands,
    legend,
    steps,
    columns: shown.map(({ label, values }) => [label, values]),
    scale: panel.log ? { distr: 3 } : { range: tight(panel) },
    axis: panel.log ? { filter: logLabels, values: apart } : {},
  };
}

// The step under the pointer; empty without a pointer.
function whereAt(panel, step) {
  return step === undefined ? '' : h('span.at', `${panel.x} ${number(step)}`);
}

// A line or an area in the legend, with its value under the pointer.
function keyOf(mark, label, value, more = '') {
  const shown = value === undefined ? null : h('b', number(value));
  return h('span.key', mark, `${label} `, shown, more);
}

// Label each tick separately, with as many digits as it needs.
function apart(u, splits) {
  return splits.map((value) => tickLabels([value])[0]);
}

// The labeled ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or only the powers.
function logLabels(u, splits) {
  const decades = Math.log10(u.scales.y.max / u.scales.y.min);
  const firsts = decades > 2.5 ? [1] : [1, 2, 5];
  const first = (value) => Number(value.toExponential(3).split('e')[0]);
  return splits.map((value) => (firsts.includes(first(value)) ? value : null));
}

// A range that covers all values, starts at 0 if they come near it, and stays within 0 and 1 for shares.
function tight(panel) {
  return (u, min, max) => {
    if (min === null) return [0, 1];
    const pad = 0.06 * (max - min) || Math.abs(max) * 0.1 || 1;
    const low = min >= 0 && min - pad < 0.35 * max ? 0 : min - pad;
    return panel.share ? [Math.max(low, 0), Math.min(max + pad, 1)] : [low, max + pad];
  };
}

// A line sample for the legend.
function sample(place) {
  const dashes = { 'stroke-width': 2.5, 'stroke-dasharray': lineDash(place).join(' ') };
  const line = svg('line', { x1: 0, x2: 26, y1: 4, y2: 4, ...dashes });
  line.style.stroke = `var(--line-${place % PALETTE})`;
  return svg('svg', { width: 26, height: 8, class: 'sample', 'aria-hidden': 'true' }, line);
}

// ---- Areas ----

// Outcomes have the same colors everywhere; other areas take colors in order.
const FILLS = { correct: 2, wrong: 1, 'no answer': 5, 'timed out': 3, crashed: 4 };

function stackChart(panel) {
  const fills = panel.layers.map(({ label }, index) => FILLS[label] ?? index % PALETTE);
  const sums = [];
  for (const { values } of panel.layers) {
    const below = sums.at(-1);
    sums.push(values.map((value, place) => (below?.[place] ?? 0) + (value ?? 0)));
  }
  // From the top down: each area reaches down to 0, and the next one is drawn over it.
  const order = panel.layers.map((_, index) => index).reverse();
  const series = order.map((index) => ({
    stroke: () => color('surface'),
    width: panel.steps.length < FEW ? 1 : 0, // many edges would cover the areas
    fill: () => lineColor(fills[index]),
    points: { show: false },
  }));
  const legend = (at) => [
    whereAt(panel, panel.steps[at]),
    ...order.map((index) => {
      const { label, values } = panel.layers[index];
      const swatch = h('i.swatch');
      swatch.style.background = `var(--line-${fills[index]})`;
      return keyOf(swatch, label, values[at]);
    }),
  ];
  return {
    data: [panel.steps, ...order.map((index) => sums[index])],
    series,
    legend,
    steps: panel.steps,
    columns: panel.layers.map((layer) => [layer.label, layer.values]),
    scale: { range: () => [0, panel.top] },
  };
}

// ---- Heat maps ----

function heatChart(panel) {
  const most = panel.counts.flat().reduce((a, b) => Math.max(a, b), 1);
  const steps = panel.steps;
  const under = (u) => {
    const { ctx } = u;
    const shades = [color('heat-low'), color('heat-high')].map(rgb);
    const height = Math.abs(u.valToPos(0, 'y', true) - u.valToPos(1, 'y', true));
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    steps.forEach((step, place) => {
      const before = place ? (step + steps[place - 1]) / 2 : step - 0.5;
      const after = place < steps.length - 1 ? (step + steps[place + 1]) / 2 : step + 0.5;
      const [left, right] = [u.valToPos(before, 'x', true), u.valToPos(after, 'x', true)];
      panel.counts.forEach((counts, bucket) => {
        if (!counts[place]) return;
        ctx.fillStyle = mixed(shades, 0.08 + 0.92 * Math.sqrt(counts[place] / most));
        ctx.fillRect(left, u.valToPos(bucket + 0.5, 'y', true), right - left + 0.6, height);
      });
    });
    ctx.restore();
  };
  const legend = (at) => {
    const { what, x } = panel;
    if (at === null) {
      const ramp = h('i.ramp', { 'aria-hidden': 'true' });
      return [h('span.at', `${what}: 0 `), ramp, ` ${number(most)}`];
    }
    const ofBucket = (counts, k) => h('span.key', `${k}: `, h('b', number(counts[at])));
    const where = `${x} ${number(steps[at])}, ${what} by bucket: `;
    return [h('span.at', where), ...panel.counts.map(ofBucket)];
  };
  return {
    data: [steps, steps.map(() => null)],
    series: [{}],
    legend,
    steps,
    under,
    columns: panel.counts.map((counts, bucket) => [`bucket ${bucket}`, counts]),
    scale: { range: () => [-0.5, panel.counts.length - 0.5] },
    axis: { splits: () => panel.counts.map((_, bucket) => bucket) },
    grid: { show: false }, // it would be drawn over the colors
  };
}

function rgb(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

function mixed([low, high], share) {
  return `rgb(${low.map((value, index) => Math.round(value + share * (high[index] - value))).join(' ')})`;
}
