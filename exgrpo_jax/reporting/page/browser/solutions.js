// The responses to a question: stored, replayed and wrong, and how its solutions changed.

async function solutions(run, rows, row, visits, recordings, replays) {
  const all = await part(`stored-${run}`);
  const stored = (all && all.questions[row]) || [];
  const items = stored.map((solution, place) => {
    const own = withTexts(solution, all.pieces);
    const replay = replays.find((other) => other.written === solution.step && isSame(own, other));
    const words = [
      solution.step ? `Written in step ${solution.step}` : 'Written before the run',
      plural(own.texts.length, 'token'),
      `replayed ${plural(solution.times, 'time')}`,
    ];
    return unfold(
      `stored ${place}`,
      words.join(', ') + (replay ? `; values from the replay in step ${replay.step}` : ''),
      (key) => tokensView(replay || own, 'ratio', key),
      stored.length < 3,
    );
  });
  const solved = [
    ...stored.map((solution) => withTexts(solution, all.pieces)),
    ...replays.map((replay) => ({ ...replay, step: replay.written })),
    ...recordedWhere(rows, visits, recordings, (name, { past }) => name === 'correct' && !past),
  ].sort((a, b) => a.step - b.step);
  return [
    section('Stored responses', items.length ? items : quiet(whyNone(rows, visits, all))),
    section('First and latest solution with text', firstAndLatest(solved)),
  ];
}

// Show the changes from the first solution to the latest; `solved` is sorted by step.
function firstAndLatest(solved) {
  const [first, last] = [solved[0], solved.at(-1)];
  if (!solved.length) return quiet('This file contains no solution text.');
  const [from, to] = [first.step, last.step];
  if (from === to) return quiet(`All solutions with text in this file are from step ${from}.`);
  if (isSame(first, last))
    return quiet(`The solution from step ${to} is identical to the one from step ${from}.`);
  return [
    quiet(`From step ${from} to step ${to}: `, h('del', 'removed'), ' ', h('ins', 'added')),
    difference(first.texts.join(''), last.texts.join('')),
  ];
}

function whyNone(rows, visits, all) {
  if (!all) return 'The newest checkpoint could not be read.';
  const isKept = rows.visits.bucket_after[visits.at(-1)] !== null;
  return isKept
    ? 'The question is in the buffer, but its solutions either do not fit into this file or are newer than the newest checkpoint.'
    : 'The question is not in the buffer: it was never partly solved, or it has retired.';
}

// The recorded replays, newest first.
function lastReplays(rows, visits, recordings) {
  const found = visits.flatMap((visit, index) => {
    const replay = recordings[index] && replayOfVisit(rows, visit);
    const response = replay && [...recordings[index].values()].find((member) => member.past);
    const step = rows.visits.step[visit];
    return response ? [{ ...response, written: replay.written, step }] : [];
  });
  return found.reverse();
}

function isSame(one, other) {
  return one.texts.join('') === other.texts.join('');
}

function recordedWhere(rows, visits, recordings, isWanted) {
  return visits.flatMap((visit, place) => {
    const [step, first] = [rows.visits.step[visit], rows.visits.first[visit]];
    const members = first < 0 ? [] : [...(recordings[place] || [])];
    return members
      .map(([sample, response]) => ({ ...response, step, index: first + sample }))
      .filter((response) => isWanted(outcomeOf(rows, response.index), response));
  });
}

function replayed(replays) {
  return section(
    `Replays (${replays.length} recorded)`,
    replays.map((replay) =>
      unfold(
        `replay ${replay.step}`,
        `Step ${replay.step}: the solution from step ${replay.written}`,
        (key) => tokensView(replay, 'ratio', key),
      ),
    ),
    !replays.length && quiet('No replay was recorded token by token.'),
  );
}

function mistakes(rows, visits, recordings) {
  const wrong = recordedWhere(rows, visits, recordings, (name) => name !== 'correct');
  return section(
    `Incorrect (${wrong.length} recorded)`,
    wrong.map((response) =>
      unfold(
        `wrong ${response.step}/${response.sample}`,
        h('span', `Step ${response.step}: `, why(rows, response.index)),
        (key) => tokensView(response, 'entropy', key),
      ),
    ),
    !wrong.length && quiet('No incorrect response was recorded token by token.'),
  );
}

// Explain a response's verdict.
function why(rows, index) {
  const name = outcomeOf(rows, index);
  const own = h('b', extracted(rows, index) ?? 'nothing');
  const truth = h('b', truthOf(rows, index) ?? 'not recorded');
  const words = {
    wrong: ['extracted ', own, ', but the answer is ', truth],
    'no answer': 'no answer could be extracted',
  }[name];
  const reason = words ?? rows.responses.reason[index];
  return [outcome(name), reason && [': ', reason], cutMark(rows, index)];
}
