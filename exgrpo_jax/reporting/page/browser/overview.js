// What ran, and how it went.

async function overviewPage(run) {
  const { overview, missing } = page.runs[run];
  const marks = overview.warnings.map((warning) => warning.step);
  return [
    notes(missing),
    h(
      'dl',
      { class: 'facts' },
      overview.facts.map(([name, value]) =>
        h('div', null, h('dt', null, name), h('dd', null, value)),
      ),
    ),
    overview.scores.length ? section('Evaluation', scoresTable(overview.scores)) : null,
    section(
      'Curves',
      h(
        'p',
        { class: 'quiet' },
        'Smooth lines are means over neighbouring steps, the faint ones behind them the values. Click a step for its responses. Drag to zoom, ' +
          'double-click or Escape to see all steps; all charts follow.',
        marks.length ? ' A triangle marks a step with a warning.' : '',
      ),
      grid(overview.panels, marks),
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

function notes(missing) {
  return missing.length
    ? h(
        'ul',
        { class: 'notes', 'aria-label': 'What is missing' },
        missing.map((note) => h('li', null, note)),
      )
    : null;
}

function scoresTable(scores) {
  const cell = (point) =>
    h(
      'span',
      { class: 'point' },
      h('b', null, number(point.value)),
      ` (${interval(point.low, point.high)}) at step ${point.step}`,
    );
  return table(
    ['benchmark', 'measure', 'first', 'last', 'best'],
    scores.map((score) => [
      score.evaluation,
      score.measure,
      cell(score.first),
      cell(score.last),
      cell(score.best),
    ]),
    'Scores with 95% intervals',
    'cards',
  );
}
