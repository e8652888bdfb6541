// A run's overview: scores, learning signal, facts, curves, warnings and settings.

async function overviewPage(run) {
  const { overview, missing } = page.runs[run];
  const { panels, signal } = overview;
  const marks = overview.warnings.map((warning) => warning.step);
  const all = Object.values(panels).flat();
  const charts = (...names) => {
    const chosen = names.flatMap((name) => panels[name]);
    return grid(chosen, marks, all);
  };
  const facts = overview.facts.map(([name, value]) => tile(name, value));
  const warned = overview.warnings.map(({ step, text }) => {
    return [h('a', { href: stepAddress(step) }, String(step)), text];
  });
  const settings = overview.settings.map(([name, base, own]) => [h('code', name), base, own]);
  const starts = overview.starts.map((start) => [
    ...[start.first_step, start.time, h('code', start.command), start.commit],
    ...[start.versions, start.python, start.system],
  ]);
  return [
    section('Score', scoreTiles(overview), charts('score')),
    section('Next steps', overview.next.map(advice)),
    section(
      'Learning signal',
      signal?.note && h('p.notes', { id: 'silent' }, signal.note),
      signal ? signalTiles(signal) : quiet('No step has finished yet.'),
      charts('signal'),
    ),
    notes(missing),
    section('Run', h('dl.facts', facts)),
    section(
      'Curves',
      quiet(
        'Smooth lines are means over neighboring steps; faint lines show the raw values. ' +
          'Click a step to see its responses. Drag to zoom; double-click or press Escape to see ' +
          'all steps. All charts zoom together.',
        marks.length > 0 && ' A triangle marks a step with a warning.',
      ),
      !overview.replays && quiet(NO_REPLAY),
      charts('training', 'replay'),
    ),
    section(
      `Warnings (${marks.length})`,
      marks.length
        ? table('step|warning', warned, 'Warnings')
        : quiet('The run printed no warnings.'),
    ),
    section(
      'Settings',
      quiet("This run's settings that differ from the base config."),
      table('setting|base|this run', settings, 'Settings'),
    ),
    section(
      'Starts',
      table('from step|time|command|commit|versions|Python|system', starts, 'Starts'),
    ),
  ];
}

function notes(missing, label = 'Missing data') {
  const items = missing.map((note) => h('li', note));
  return items.length > 0 && h('ul.notes', { 'aria-label': label }, items);
}

function tile(name, value, more) {
  return h('div', h('dt', name), h('dd', value), more && h('dd.more', more));
}

// The last score of each evaluation, with the first and the best.
function scoreTiles({ scores, signal }) {
  const at = (point) => `${number(point.value)} at step ${point.step}`;
  if (!scores.length) {
    const more = signal ? '; its pass rate in training is below.' : ' yet.';
    return quiet('This run has no evaluation', more);
  }
  return h(
    'dl.facts.scores',
    scores.map(({ evaluation, measure, first, last, best, change }) =>
      tile(`${measure} on ${evaluation}`, number(last.value), [
        last.step ? `after step ${last.step}` : 'before the first step',
        last.low === null ? '' : `, 95% interval ${interval(last.low, last.high)}`,
        h('br'),
        last.step === first.step ? 'no other score yet' : `first ${at(first)}, best ${at(best)}`,
        change && [h('br'), changeOf(change)],
      ]),
    ),
  );
}

// Say whether the score has changed since the first evaluation, by its interval over questions.
function changeOf({ from, estimate: [mean, low, high], questions, sign }) {
  const words = { 1: 'a significant rise', 0: 'may be due to chance', '-1': 'a significant fall' };
  return h(
    'span.change',
    `since step ${from} `,
    h('b', signed(mean)),
    `, 95% interval ${signed(low)} to ${signed(high)} over ${plural(questions, 'question')}: `,
    h('b', words[sign]),
  );
}

// A sentence and its commands.
function advice([words, commands]) {
  return h('div.advice', h('p', words), commands && h('pre', h('code', commands)));
}

// Means over the last steps, skipped updates and the learning rate.
function signalTiles({ from, to, shares, skipped, learning_rate }) {
  const when = from === to ? `step ${to}` : `mean of steps ${from} to ${to}`;
  return h(
    'dl.facts',
    shares.map(([name, share]) => tile(name, percent(share), when)),
    tile('updates skipped', number(skipped), 'in the whole run'),
    tile('learning rate', number(learning_rate), `at step ${to}`),
  );
}

function percent(share) {
  if (share > 0 && share < 0.0001) return 'below 0.01%';
  return share > 0 && share < 0.01 ? `${(100 * share).toFixed(2)}%` : `${Math.round(100 * share)}%`;
}
