// The responses to a question: stored, replayed and wrong, and how its solutions changed.

async function solutions(run, rows, row, visits, recordings, replays) {
  const all = await part(`stored-${run}`);
  const stored = (all && all.questions[row]) || [];
  const items = stored.map((solution) => {
    const own = withTexts(solution, all.pieces);
    const replay = replays.find((other) => other.written === solution.step && isSame(own, other));
    const words = [
      solution.step ? `Written in step ${solution.step}` : 'Written before the run',
      plural(own.texts.length, 'token'),
      `replayed ${plural(solution.times, 'time')}`,
    ];
    return unfold(
      words.join(', ') + (replay ? `; values from the replay in step ${replay.step}` : ''),
      () => tokensView(replay || own, 'ratio'),
      stored.length < 3,
    );
  });
  const solved = [
    ...stored.map((solution) => withTexts(solution, all.pieces)),
    ...replays.map((replay) => ({ ...replay, step: replay.written })),
    ...recordedSuccesses(rows, visits, recordings),
  ].sort((a, b) => a.step - b.step);
  return [
    section('Stored responses', items.length ? items : quiet(whyNone(rows, visits, all))),
    section('First and latest solution with text', firstAndLatest(solved)),
  ];
}

// Show the changes from the first solution to the latest; `solved` is sorted by step.
function firstAndLatest(solved) {
  const [first, last] = [solved[0], solved.at(-1)];
  if (!solved.length) return quiet('No solution has its text stored in this file.');
  if (first.step === last.step)
    return quiet(`All solutions with text in this file are from step ${first.step}.`);
  if (isSame(first, last))
    return quiet(
      `The solution from step ${last.step} is identical to the one from step ${first.step}.`,
    );
  return [
    quiet(
      ...[`From step ${first.step} to step ${last.step}: `, h('del', 'removed')],
      ...[' ', h('ins', 'added')],
    ),
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
  return visits
    .flatMap((visit, index) => {
      const replay = recordings[index] ? replayOfVisit(rows, visit) : null;
      const response = replay && [...recordings[index].values()].find((member) => member.past);
      return response
        ? [{ ...response, written: replay.written, step: rows.visits.step[visit] }]
        : [];
    })
    .reverse();
}

function isSame(one, other) {
  return one.texts.join('') === other.texts.join('');
}

function recordedSuccesses(rows, visits, recordings) {
  return recordedWhere(
    rows,
    visits,
    recordings,
    (name, response) => name === 'correct' && !response.past,
  );
}

function recordedWhere(rows, visits, recordings, isWanted) {
  const { outcomes, outcome: codes } = rows.responses;
  return visits.flatMap((visit, index) =>
    [...(recordings[index] || [])]
      .filter(
        ([sample, response]) =>
          rows.visits.first[visit] >= 0 &&
          isWanted(outcomes[codes[rows.visits.first[visit] + sample]], response),
      )
      .map(([sample, response]) => ({
        ...response,
        step: rows.visits.step[visit],
        index: rows.visits.first[visit] + sample,
      })),
  );
}

function replayed(replays) {
  return section(
    `Replays (${replays.length} recorded)`,
    replays.map((replay) =>
      unfold(`Step ${replay.step}: the solution from step ${replay.written}`, () =>
        tokensView(replay, 'ratio'),
      ),
    ),
    replays.length ? null : quiet('No replay was recorded token by token.'),
  );
}

function mistakes(rows, visits, recordings) {
  const wrong = recordedWhere(rows, visits, recordings, (name) => name !== 'correct');
  return section(
    `Incorrect (${wrong.length} recorded)`,
    wrong.map((response) =>
      unfold(h('span', `Step ${response.step}: `, why(rows, response.index)), () =>
        tokensView(response, 'entropy'),
      ),
    ),
    wrong.length ? null : quiet('No incorrect response was recorded token by token.'),
  );
}

// Explain a response's verdict.
function why(rows, index) {
  const { outcomes, outcome: codes, reason } = rows.responses;
  const name = outcomes[codes[index]];
  const place = rows.place.get(rows.visits.question[rows.visitOf[index]]);
  const truth = rows.questions.answer[place];
  const words =
    {
      wrong: [
        'extracted ',
        h('b', extracted(rows, index) ?? 'nothing'),
        ', but the answer is ',
        h('b', truth ?? 'not recorded'),
      ],
      'no answer': ['no answer could be extracted'],
    }[name] || (reason[index] ? [reason[index]] : []);
  return [
    outcome(name),
    words.length ? ': ' : '',
    words,
    rows.responses.truncated[index] ? ' (cut at the limit)' : '',
  ];
}
