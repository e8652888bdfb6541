// What ran, and how it went.

async function overviewPage(run) {
  const { overview, missing } = page.runs[run];
  const marks = overview.warnings.map((warning) => warning.step);
  return [
    notes(missing),
    h('dl', { class: 'facts' }, overview.facts.map(([name, value]) => h('div', null, h('dt', null, name), h('dd', null, value)))),
    overview.scores.length ? section('Evaluation', scoresTable(overview.scores)) : null,
    section('Curves', h('p', { class: 'quiet' },
      'Smooth lines are means over neighbouring steps, the faint ones behind them the values. Drag to zoom, double-click or Escape to see '
      + 'all steps; all charts follow.', marks.length ? ' A triangle marks a step with a warning.' : ''), grid(overview.panels, marks)),
    section(`Warnings (${overview.warnings.length})`, overview.warnings.length
      ? table(['step', 'warning'], overview.warnings.map(({ step, text }) => [stepLink(step), text]), 'Warnings')
      : h('p', { class: 'quiet' }, 'The run printed none.')),
    section('Settings', h('p', { class: 'quiet' }, 'What this run has otherwise than the base config.'),
      table(['setting', 'base', 'this run'], overview.settings.map(([name, base, own]) => [h('code', null, name), base, own]), 'Settings')),
    section('Starts', table(['from step', 'time', 'command', 'commit', 'versions', 'Python', 'system'],
      overview.starts.map((start) => [start.first_step, start.time, h('code', null, start.command), start.commit, start.versions, start.python, start.system]), 'Starts')),
  ];
}

function stepLink(step) {
  return link({ page: 'responses', from: step, to: step }, String(step));
}

function notes(missing) {
  return missing.length ? h('ul', { class: 'notes', 'aria-label': 'What is missing' }, missing.map((note) => h('li', null, note))) : null;
}

function scoresTable(scores) {
  const cell = (point) => h('span', { class: 'point' }, h('b', null, number(point.value)), ` (${interval(point.low, point.high)}) at step ${point.step}`);
  return table(['benchmark', 'measure', 'first', 'last', 'best'],
    scores.map((score) => [score.evaluation, score.measure, cell(score.first), cell(score.last), cell(score.best)]),
    'Scores with 95% intervals');
}

// ---- Buffer ----

async function bufferPage(run) {
  const { buffer, missing } = page.runs[run];
  const rows = await recorded(run);
  return [
    notes(missing),
    buffer.panels.length ? grid(buffer.panels) : h('p', { class: 'quiet' }, 'The buffer was never used, or nothing of it is recorded.'),
    buffer.replayed.length ? section('Replayed most often',
      table(['question', 'text', 'replays', 'visits', 'first pass rate', 'last pass rate', 'last visit', 'retired'],
        buffer.replayed.map((question) => [
          questionLink(question.question), questionText(rows, question.question), question.replays, question.visits,
          question.first, question.last, question.step,
          question.retired === null ? 'no' : `step ${question.retired}`,
        ]), 'Questions replayed most often')) : null,
  ];
}

function questionLink(row) {
  return link({ page: 'question', question: row }, String(row));
}

function questionText(rows, row) {
  const text = rows && rows.place ? rows.questions.text[rows.place.get(row)] : null;
  return h('span', { class: 'excerpt' }, text ?? 'text not recorded');
}
