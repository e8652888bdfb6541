// The replay buffer over the course of a run, and the most replayed questions.

const NO_REPLAY = 'This run does not replay (config.replay.ratio=0). It is plain GRPO.';

const NOTHING_YET = 'The buffer is still empty, or no data about it was recorded.';

async function bufferPage(run) {
  const { buffer, missing } = page.runs[run];
  const rows = await recorded(run);
  return [
    notes(missing),
    buffer.panels.length ? grid(buffer.panels) : quiet(buffer.is_used ? NOTHING_YET : NO_REPLAY),
    buffer.replayed.length
      ? section(
          'Replayed most often',
          table(
            'question|text|replays|visits|first pass rate|last pass rate|last visit|retired',
            buffer.replayed.map(({ question, replays, visits, first, last, step, retired }) => [
              ...[questionLink(question), questionText(rows, question), replays, visits],
              ...[first, last, step, retired === null ? 'no' : `step ${retired}`],
            ]),
            'Questions replayed most often',
          ),
        )
      : null,
  ];
}

function questionLink(row) {
  return link({ page: 'question', question: row }, String(row));
}

function questionText(rows, row) {
  const text = rows && rows.place ? rows.questions.text[rows.place.get(row)] : null;
  return h('span.excerpt', text ?? 'text not recorded');
}
