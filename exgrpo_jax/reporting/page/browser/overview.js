// How it goes, why it goes no further, and what ran.

async function overviewPage(run) {
  const { overview, missing } = page.runs[run];
  const { panels, signal } = overview;
  const marks = overview.warnings.map((warning) => warning.step);
  const all = Object.values(panels).flat();
  const charts = (names) =>
    grid(
      names.flatMap((name) => panels[name]),
      marks,
      all,
    );
  return [
    section('Score', scoreTiles(overview), charts(['score'])),
    section(
      'Learning signal',
      overview.plateau ? plateauNote(overview.plateau) : null,
      signal ? signalTiles(signal) : h('p', { class: 'quiet' }, 'No step is finished yet.'),
      charts(['signal']),
    ),
    notes(missing),
    section(
      'Run',
      h(
        'dl',
        { class: 'facts' },
        overview.facts.map(([name, value]) => tile(name, value)),
      ),
    ),
    section(
      'Curves',
      h(
        'p',
        { class: 'quiet' },
        'Smooth lines are means over neighbouring steps, the faint ones behind them the values. Click a step for its responses. Drag to zoom, ' +
          'double-click or Escape to see all steps; all charts follow.',
        marks.length ? ' A triangle marks a step with a warning.' : '',
      ),
      overview.replays ? null : h('p', { class: 'quiet' }, NO_REPLAY),
      charts(['training', 'replay']),
    ),
    section(
      `Warnings (${overview.warnings.length})`,
      overview.warnings.length
        ? table(
            ['step', 'warning'],
            overview.warnings.map(({ step, text }) => [stepLink(step), text]),
            'Warnings',
          )
        : h('p', { class: 'quiet' }, 'The run printed none.'),
    ),
    section(
      'Settings',
      h('p', { class: 'quiet' }, 'What this run has otherwise than the base config.'),
      table(
        ['setting', 'base', 'this run'],
        overview.settings.map(([name, base, own]) => [h('code', null, name), base, own]),
        'Settings',
      ),
    ),
    section(
      'Starts',
      table(
        ['from step', 'time', 'command', 'commit', 'versions', 'Python', 'system'],
        overview.starts.map((start) => [
          start.first_step,
          start.time,
          h('code', null, start.command),
          start.commit,
          start.versions,
          start.python,
          start.system,
        ]),
        'Starts',
      ),
    ),
  ];
}

function stepLink(step) {
  return h('a', { href: stepAddress(step) }, String(step));
}

function notes(missing, label = 'What is missing') {
  return missing.length
    ? h(
        'ul',
        { class: 'notes', 'aria-label': label },
        missing.map((note) => h('li', null, note)),
      )
    : null;
}

function tile(name, value, more) {
  return h(
    'div',
    null,
    h('dt', null, name),
    h('dd', null, value),
    more ? h('dd', { class: 'more' }, more) : null,
  );
}

// The last score of each evaluation, with where it began and what was best.
function scoreTiles({ scores, signal }) {
  const at = (point) => `${number(point.value)} at step ${point.step}`;
  if (!scores.length) {
    return h(
      'p',
      { class: 'quiet' },
      'This run has no evaluation',
      signal ? '; its pass rate in training is below.' : ' yet.',
    );
  }
  return h(
    'dl',
    { class: 'facts scores' },
    scores.map(({ evaluation, measure, first, last, best }) =>
      tile(`${measure} of ${evaluation}`, number(last.value), [
        last.step ? `after step ${last.step}` : 'before the first step',
        last.low === null ? '' : `, 95% interval ${interval(last.low, last.high)}`,
        h('br'),
        last.step === first.step ? 'the only one so far' : `first ${at(first)}, best ${at(best)}`,
      ]),
    ),
  );
}

// Means of the last steps, and what became of the updates.
function signalTiles({ from, to, shares, skipped, learning_rate }) {
  const when = from === to ? `step ${to}` : `mean of steps ${from} to ${to}`;
  return h(
    'dl',
    { class: 'facts' },
    shares.map(([name, share]) => tile(name, percent(share), when)),
    tile('updates skipped', number(skipped), 'in the whole run'),
    tile('learning rate', number(learning_rate), `at step ${to}`),
  );
}

function percent(share) {
  if (share > 0 && share < 0.0001) return 'below 0.01%';
  return share > 0 && share < 0.01 ? `${(100 * share).toFixed(2)}%` : `${Math.round(100 * share)}%`;
}

function plateauNote({ step, text }) {
  return h(
    'p',
    { class: 'notes', id: 'plateau' },
    h('b', null, 'Why it stopped rising: '),
    text,
    ` (As of step ${step}.)`,
  );
}
