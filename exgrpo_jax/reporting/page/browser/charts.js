// uPlot charts. All charts over steps are linked: hovering over one shows that step in all of them,
// dragging over one zooms all, and Escape or a double click shows everything again. Clicking a step
// of a run opens its responses.

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [1, 4], [12, 3], [3, 3, 8, 3]];
const FONT = '12px system-ui, sans-serif';
const PALETTE = 8;
const DOUBLE = 250; // ms within which a second click makes a double click
const WHOLE = Array.from({ length: 27 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));
const ARROWS = { ArrowLeft: -1, ArrowRight: 1 };
const charts = new Set(); // all charts on the page

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function lineColor(index) {
  return color(`line-${index % PALETTE}`);
}

// Lines that share a color have different dashes.
function lineDash(index) {
  return DASHES[(index + Math.floor(index / PALETTE)) % DASHES.length];
}

// A figure: title, unit, chart, legend with the values under the pointer, and a table of values.
function chart(panel, marks, extent) {
  const made = { lines: linesChart, stack: stackChart, heat: heatChart }[panel.kind](panel);
  const readout = h('p.readout');
  const area = h('div.plot', {
    tabindex: 0,
    role: 'img',
    'aria-label':
      `${panel.title}, ${panel.unit}, over ${panel.x}. Arrow keys move along the chart, ` +
      `${leads(panel.x) ? 'Enter opens the responses of a step, ' : ''}Escape shows everything. ` +
      'A table of the values follows.',
  });
  const figure = h(
    'figure',
    { 'data-title': panel.title },
    h('figcaption', h('h3', panel.title), h('span.unit', panel.unit)),
    area,
    readout,
    unfold(`values ${panel.title}`, 'Values', () => valuesTable(panel, made)),
  );
  const show = (index) => readout.replaceChildren(...made.legend(index));
  show(null);
  // Draw the chart once it has a width.
  new ResizeObserver(() => {
    if (area.plot) area.plot.setSize(sizeOf(area));
    else if (area.clientWidth) draw(area, panel, made, marks, show, extent);
  }).observe(area);
  area.addEventListener('keydown', (event) => {
    readout.setAttribute('aria-live', 'polite'); // announced when keys are used, not with a pointer
    steer(event, area);
  });
  return figure;
}

function sizeOf(area) {
  return { width: area.clientWidth, height: area.clientHeight };
}

function draw(area, panel, made, marks, show, extent) {
  const key = panel.x;
  const [min, max] = zoomOf(key, extent);
  const label = { label: key, labelSize: 18, labelGap: 0, labelFont: FONT };
  const plot = new uPlot(
    {
      ...sizeOf(area),
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key, scales: ['x', null] },
        drag: { x: true, y: false },
        bind: { dblclick: (u) => () => showAll(u) },
      },
      scales: { x: { time: false, min, max }, y: made.scale },
      axes: [
        axis({ space: 50, incrs: WHOLE, grid: made.grid, size: 34, ...label }),
        axis({ size: labelWidth, grid: made.grid, ...made.axis }),
      ],
      series: [{}, ...made.series],
      bands: made.bands || [],
      hooks: {
        ready: [(u) => Object.assign(u, { isReady: true })],
        setCursor: [(u) => show(u.cursor.left >= 0 ? u.cursor.idx : null)],
        setScale: [(u, name) => name === 'x' && u.isReady && zoomAll(u)],
        drawClear: made.under ? [made.under] : [],
        draw: [(u) => drawMarks(u, marks)],
      },
    },
    made.data,
    area,
  );
  Object.assign(plot, { kind: key, extent, show, title: panel.title });
  if (leads(key)) openByClick(plot);
  area.plot = plot;
  charts.add(plot);
  const at = plot.data[0].indexOf(pointed[panel.title]);
  if (at >= 0) queueMicrotask(() => point(area, at)); // after uPlot has set its scales
}

let pointed = {}; // chart title -> the step under the pointer before an update

function rememberPointed() {
  const all = [...charts].filter(({ cursor }) => cursor.left >= 0);
  pointed = Object.fromEntries(all.map((plot) => [plot.title, plot.data[0][plot.cursor.idx]]));
}

// Move the pointer of a chart to one of its steps.
function point(area, index) {
  const { plot } = area;
  area.index = index;
  plot.setCursor({ left: plot.valToPos(plot.data[0][index], 'x'), top: 10 });
  plot.show(index);
}

function axis(more) {
  return {
    stroke: () => color('quiet'),
    font: FONT,
    ticks: { stroke: () => color('grid'), width: 1 },
    values: (u, splits) => tickLabels(splits),
    ...more,
    grid: more.grid || { stroke: () => color('grid'), width: 1 },
  };
}

// Width of the vertical axis' labels: the same for all charts unless a label is longer.
function labelWidth(u, labels) {
  return Math.max(58, 22 + 7 * Math.max(0, ...(labels || []).map((label) => label.length)));
}

// Labels with just enough digits to distinguish the ticks of an axis; null gets no label.
function tickLabels(splits) {
  const known = splits.filter((value) => value !== null).map((value) => Math.abs(value));
  const isTiny = Math.max(...known) < 0.001;
  const decimals = (value) => {
    const written = Number(value.toPrecision(12));
    const text = isTiny ? written.toExponential() : written.toFixed(12);
    return text.match(/\.(\d*[1-9])/)?.[1].length ?? 0;
  };
  const most = Math.max(0, ...known.map(decimals));
  return splits.map((value) => {
    if (value === null) return '';
    if (isTiny) return value === 0 ? '0' : value.toExponential(most);
    const digits = { minimumFractionDigits: most, maximumFractionDigits: most };
    return value === 0 ? '0' : value.toLocaleString('en-US', digits);
  });
}

let isZooming = false;

// Show the same range in all charts of this kind, and keep it in the URL.
function zoomAll(from) {
  if (isZooming) return;
  isZooming = true;
  const { kind, extent } = from;
  const { min, max } = from.scales.x;
  for (const plot of charts) {
    const { x } = plot.scales;
    if (plot.kind === kind && (x.min !== min || x.max !== max)) plot.setScale('x', { min, max });
  }
  isZooming = false;
  const isAll = min <= extent[0] && max >= extent[1];
  const part = [min, max].map((end) => Number(end.toPrecision(5))).join('_');
  history.replaceState(null, '', address({ [`zoom_${kind}`]: isAll ? null : part }));
}

// The range given in the URL, or everything.
function zoomOf(kind, [first, last]) {
  const [from, to] = (choice().get(`zoom_${kind}`) || '').split('_').map(Number);
  const [min, max] = [Math.max(from, first), Math.min(to, last)];
  return min < max ? [min, max] : [first, last];
}

// Return true if the points in charts of this kind are steps of a single run.
function leads(kind) {
  return kind === 'step' && shownPage() !== 'compare';
}

function openByClick(plot) {
  let waiting = 0;
  plot.over.classList.add('leads');
  plot.over.addEventListener('click', (event) => {
    clearTimeout(waiting);
    if (event.detail > 1) return; // a double click shows all steps
    const step = plot.data[0][plot.posToIdx(event.offsetX)];
    waiting = setTimeout(() => {
      if (plot.root.isConnected) location.hash = stepAddress(step);
    }, DOUBLE);
  });
}

function showAll(plot) {
  plot.setScale('x', { min: plot.extent[0], max: plot.extent[1] });
}

function steer(event, area) {
  const plot = area.plot;
  if (!plot) return;
  const steps = plot.data[0];
  if (event.key === 'Escape') {
    showAll(plot);
  } else if (event.key === 'Enter' && area.index !== undefined && leads(plot.kind)) {
    location.hash = stepAddress(steps[area.index]);
  } else if (event.key in ARROWS) {
    const from = area.index ?? (event.key === 'ArrowLeft' ? steps.length : -1);
    point(area, Math.min(Math.max(from + ARROWS[event.key], 0), steps.length - 1));
  } else {
    return;
  }
  event.preventDefault();
}

// Draw a triangle at the top for each warning.
function drawMarks(u, marks) {
  if (u.kind !== 'step') return;
  const { ctx, bbox } = u;
  ctx.fillStyle = color('warning');
  for (const step of new Set(marks)) {
    const x = u.valToPos(step, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const size = 5 * devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top);
    ctx.lineTo(x + size, bbox.top);
    ctx.lineTo(x, bbox.top + 1.6 * size);
    ctx.fill();
  }
}

function valuesTable(panel, { columns, steps }) {
  const names = [panel.x, ...columns.map(([label]) => label)];
  const row = (step, index) => [step, ...columns.map(([, values]) => values[index])];
  return table(names, steps.map(row), panel.title);
}

// A grid of panels. All panels in `all` with the same horizontal axis show the same range.
function grid(panels, marks = [], all = panels) {
  const extents = {};
  for (const panel of all) {
    const steps = panel.kind === 'lines' ? panel.lines.flatMap((line) => line.steps) : panel.steps;
    const known = extents[panel.x] || [Infinity, -Infinity];
    // Not Math.min(...steps): a long run has more steps than a call may have arguments.
    const widen = ([low, high], step) => [Math.min(low, step), Math.max(high, step)];
    extents[panel.x] = steps.reduce(widen, known);
  }
  for (const extent of Object.values(extents)) if (extent[0] === extent[1]) extent[1] += 1;
  const figures = panels.map((panel) => chart(panel, marks, extents[panel.x]));
  return h('div.grid', figures);
}
