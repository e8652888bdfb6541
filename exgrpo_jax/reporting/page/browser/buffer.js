// The replay buffer over the course of a run, and the most replayed questions.

const NO_REPLAY = 'This run uses plain GRPO without replay (config.replay.ratio=0).';
const NOTHING_YET = 'The buffer is still empty, or no data about it was recorded.';

async function bufferPage(run) {
  const { buffer, missing } = page.runs[run];
  const rows = await recorded(run);
  const replayed = buffer.replayed.map((one) => [
    ...[questionLink(one.question), questionText(rows, one.question), one.replays, one.visits],
    ...[one.first, one.last, one.step, one.retired === null ? 'no' : `step ${one.retired}`],
  ]);
  const names = 'question|text|replays|visits|first pass rate|last pass rate|last visit|retired';
  return [
    notes(missing),
    buffer.panels.length ? grid(buffer.panels) : quiet(buffer.is_used ? NOTHING_YET : NO_REPLAY),
    replayed.length > 0 &&
      section('Replayed most often', table(names, replayed, 'Questions replayed most often')),
  ];
}

function questionLink(row) {
  return link({ page: 'question', question: row }, String(row));
}

function questionText(rows, row) {
  const text = rows && rows.place ? rows.questions.text[rows.place.get(row)] : null;
  return h('span.excerpt', text ?? 'text not recorded');
}
