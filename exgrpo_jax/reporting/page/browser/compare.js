// The comparison page for several runs.

async function comparePage() {
  const { groups, settings, panels, scores, differences, not_compared } = page.compare;
  const runs = groups.map(({ label, runs }, index) => [
    h('span', sample(index), wrapped(label)),
    runs.map(({ seed }) => seed).join(', '),
    h('code', runs.map(({ workdir }) => workdir).join(' ')),
  ]);
  const differing = settings.map(([name, ...values]) => [h('code', name), ...values]);
  const labels = groups.map(({ label }) => wrapped(label));
  const scored = scores.map((score) => [
    ...[wrapped(score.evaluation), wrapped(score.group), score.seeds, score.step],
    score.common && withDeviation(score.common),
    ...[withDeviation(score.last), score.last_steps.join(', '), withDeviation(score.best)],
  ]);
  const names =
    'benchmark|run|seeds|last common step|score at that step|last score|at step|best score';
  const title = 'Settings that differ';
  return [
    section('Runs', table('runs|seeds|folders', runs, 'Runs by setting')),
    settings.length > 0 && section(title, table(['setting', ...labels], differing, title)),
    section(
      'Scores',
      scores.length
        ? table(names, scored, 'Scores: mean over seeds ± standard deviation')
        : quiet('None of these runs was evaluated.'),
    ),
    scores.length > 0 &&
      section(
        'Differences at the last common evaluation',
        quiet(
          '95% intervals are from a paired bootstrap over common seeds, and are too narrow with ' +
            'few seeds. With fewer than two common seeds, common questions are paired instead.',
        ),
        notes(not_compared, 'Not compared'),
        differencesTable(differences),
      ),
    section(
      'Curves',
      quiet('Means over seeds; the bands show one standard deviation.'),
      grid(panels),
    ),
  ];
}

function differencesTable(differences) {
  return table(
    'benchmark|after step|from|to|difference|95% interval||paired over',
    differences.map((row) => {
      const [value, low, high] = row.estimate;
      return [
        ...[wrapped(row.evaluation), row.step, wrapped(row.from), wrapped(row.to)],
        h('b', signed(value)),
        low === null ? MISSING : `${signed(low)} to ${signed(high)}`,
        forest(row.estimate, differences),
        row.paired,
      ];
    }),
    'Paired differences',
  );
}

// A long name of a run or a benchmark takes several lines, so that its row fits the window.
function wrapped(text) {
  return h('span.excerpt', text);
}

function withDeviation([mean, deviation]) {
  return deviation === null ? number(mean) : `${number(mean)} ± ${number(deviation)}`;
}

// Draw the interval as a line, the difference as a dot on it, and 0 as a mark.
function forest([value, low, high], all) {
  const ends = all.flatMap(({ estimate }) => estimate.map((end) => Math.abs(end ?? 0)));
  const most = Math.max(1e-9, ...ends);
  const x = (share) => 60 + 55 * (share / most);
  return svg(
    'svg',
    { width: 120, height: 16, class: 'forest', 'aria-hidden': 'true' },
    svg('line', { x1: 60, x2: 60, y1: 0, y2: 16, class: 'zero' }),
    low === null ? '' : svg('line', { x1: x(low), x2: x(high), y1: 8, y2: 8, class: 'range' }),
    svg('circle', { cx: x(value), cy: 8, r: 4, class: 'dot' }),
  );
}
