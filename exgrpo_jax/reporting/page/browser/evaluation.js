// Benchmarks over steps, and the questions gained and lost between two evaluations.

const MOST_QUESTIONS = 100; // in a list

async function evaluationPage(run) {
  const benchmarks = (await part(`evaluations-${run}`)) || [];
  const { evaluation, missing } = page.runs[run];
  return [
    notes(missing),
    evaluation.panels.length > 0 && grid(evaluation.panels),
    benchmarks.length
      ? section('Gained and lost', between(benchmarks))
      : quiet('No evaluation with results for each question was recorded.'),
  ];
}

function between(benchmarks) {
  const now = choice();
  const benchmark = benchmarks.find(({ name }) => name === now.get('benchmark')) || benchmarks[0];
  const { evaluations } = benchmark;
  const place = (name, otherwise) =>
    Math.min(Number(now.get(name) ?? otherwise), evaluations.length - 1);
  const [first, second] = [place('first', 0), place('second', evaluations.length - 1)];
  const menu = (name, title, options, chosen) => {
    const onchange = (event) => {
      location.hash = address({ [name]: event.target.value });
    };
    return select(title, { name, onchange }, options, chosen);
  };
  const titles = evaluations.map(({ step, made }, index) => [
    index,
    `step ${step}${made ? `, manual: ${made}` : ''}`,
  ]);
  const names = benchmarks.map(({ name }) => [name, name]);
  return [
    h(
      'form.filters',
      { 'aria-label': 'Evaluations', onsubmit: (event) => event.preventDefault() },
      menu('benchmark', 'benchmark', names, benchmark.name),
      menu('first', 'from', titles, first),
      menu('second', 'to', titles, second),
    ),
    changes(benchmark, evaluations[first], evaluations[second]),
  ];
}

function changes(benchmark, before, after) {
  // A question counts as right if at least half of its responses are correct.
  const isRight = ({ correct, samples }, index) => correct[index] >= samples / 2;
  const kinds = { gained: [], lost: [], 'right in both': [], 'wrong in both': [] };
  benchmark.rows.forEach((_, index) => {
    const [was, is] = [isRight(before, index), isRight(after, index)];
    kinds[was ? (is ? 'right in both' : 'lost') : is ? 'gained' : 'wrong in both'].push(index);
  });
  const share = (evaluation) =>
    evaluation.correct.reduce((sum, count) => sum + count, 0) /
    (evaluation.samples * benchmark.rows.length);
  const summary = h(
    'p',
    { id: 'changes' },
    `Of ${plural(benchmark.rows.length, 'question')}, ${kinds.gained.length} were gained and ${kinds.lost.length} lost. Share of correct responses: `,
    h('b', `${number(share(before))} → ${number(share(after))}`),
    '.',
    before.samples > 1 &&
      ' A question counts as right if at least half of its responses are correct.',
  );
  return h(
    'div',
    summary,
    Object.entries(kinds).map(([kind, indices]) =>
      unfold(
        kind,
        `${{ gained: '▲ ', lost: '▼ ' }[kind] || ''}${kind}: ${number(indices.length)}`,
        () => questionList(benchmark, indices, [before, after]),
        indices.length > 0 && (kind === 'gained' || kind === 'lost'),
      ),
    ),
  );
}

function questionList(benchmark, indices, pair) {
  const rows = indices
    .slice(0, MOST_QUESTIONS)
    .map((index) => [
      String(benchmark.rows[index]),
      h('div.text', h('span.excerpt', benchmark.texts[index])),
      benchmark.answers[index],
      ...pair.map((evaluation) => written(evaluation, index)),
    ]);
  const isCut = indices.length > MOST_QUESTIONS;
  const head = ['row', 'question', 'answer', ...pair.map(({ step }) => `step ${step}`)];
  return h(
    'div',
    isCut && quiet(`Showing the first ${MOST_QUESTIONS} of ${indices.length}.`),
    table(head, rows, null, 'cards'),
  );
}

// An evaluation's responses to a question: verdict, extracted answer, and the text on demand.
function written(evaluation, index) {
  const responses = evaluation.responses[index];
  if (!responses) return `${evaluation.correct[index]} of ${evaluation.samples} correct`;
  return h(
    'div.text',
    responses.map((response, sample) => {
      const got = h('b', response.extracted ?? 'nothing');
      const words = 'extracted' in response ? [', extracted ', got] : [];
      const verdict = h('span', outcome(response.outcome), words);
      const key = `${evaluation.step} ${evaluation.made} ${index}/${sample}`;
      return unfold(key, verdict, () => h('div.tokens', response.text));
    }),
  );
}
