// One question: everything that it went through, and what was written for it.

const MOST_FOUND = 50;

async function questionPage(run) {
  const rows = await recorded(run);
  if (!rows || !rows.visits) return [notes(page.runs[run].missing)];
  const chosen = choice().get('question');
  const view = chosen === null ? null : await story(run, rows, Number(chosen));
  return [search(rows, choice().get('find') || '', view === null), view];
}

// ---- Search ----

function search(rows, wanted, isOpen) {
  const results = h('div', { 'aria-live': 'polite' });
  const input = h('input', { type: 'search', id: 'find', value: wanted, placeholder: 'text, row or answer' });
  const update = () => results.replaceChildren(...(input.value || isOpen ? found(rows, input.value) : []));
  input.addEventListener('input', update);
  input.addEventListener('change', () => history.replaceState(null, '', address({ find: input.value })));
  update();
  return h('search', null, h('label', { for: 'find' }, 'Find a question by its text, row or answer '), input, results);
}

function found(rows, wanted) {
  const word = wanted.trim().toLowerCase();
  const places = [];
  rows.questions.row.forEach((row, place) => {
    const fields = [String(row), rows.questions.answer[place] ?? ''];
    const isExact = fields.some((field) => field.toLowerCase() === word);
    if (!word || isExact || (rows.questions.text[place] ?? '').toLowerCase().includes(word)) places.push([isExact, place]);
  });
  const visits = (place) => rows.ofQuestion.get(rows.questions.row[place]).length;
  places.sort((a, b) => b[0] - a[0] || visits(b[1]) - visits(a[1]));
  const shown = places.slice(0, MOST_FOUND).map(([, place]) => {
    const row = rows.questions.row[place];
    const last = rows.ofQuestion.get(row).at(-1);
    return [questionLink(row), questionText(rows, row), rows.questions.answer[place] ?? MISSING, visits(place),
      rows.visits.correctness[last]];
  });
  const more = places.length > MOST_FOUND ? `, of which these ${MOST_FOUND} were visited most often` : '';
  return [
    h('p', { class: 'quiet', id: 'count' }, `${plural(places.length, 'question')}${more}`),
    table(['question', 'text', 'answer', 'visits', 'last pass rate'], shown, 'Questions found'),
  ];
}

// ---- The story ----

async function story(run, rows, row) {
  const visits = rows.ofQuestion.get(row);
  if (!visits) return h('p', null, `Question ${row} was never visited.`);
  const place = rows.place.get(row);
  const recordings = await Promise.all(visits.map((visit) => recordedGroup(run, rows.visits.step[visit], rows.groupOf[visit])));
  return h('article', { id: 'story' },
    h('h2', null, `Question ${row}`),
    h('blockquote', { class: 'question' }, rows.questions.text[place] ?? 'Its text is not recorded.'),
    h('p', null, 'Answer: ', h('b', null, rows.questions.answer[place] ?? 'not recorded')),
    section('Visits', strip(rows, visits), visitsTable(rows, visits)),
    await solutions(run, rows, row, visits, recordings),
    replayed(rows, visits, recordings),
    mistakes(rows, visits, recordings));
}

// A column for each visit: as high as its pass rate, with what happened to it in words below.
function strip(rows, visits) {
  const { step, correctness, replayed, bucket_after, retired_step } = rows.visits;
  return h('ol', { class: 'strip', tabindex: 0, 'aria-label': 'Visits in the order of steps' }, visits.map((visit) => {
    const share = correctness[visit];
    const fate = retired_step[visit] !== null ? 'retired' : bucket_after[visit] === null ? 'not kept' : `bucket ${bucket_after[visit]}`;
    const replay = replayOfVisit(rows, visit);
    const column = h('span', { class: `bar ${replayed[visit] ? 'replayed' : 'fresh'}` });
    column.style.height = `${Math.round(4 + 56 * share)}px`;
    return h('li', null, h('a', { href: groupAddress(rows, visit) },
      h('span', { class: 'well' }, column), h('b', null, `${Math.round(100 * share)}%`),
      h('span', null, kindOfVisit(rows, visit)), h('span', null, fate),
      replay ? [`age ${replay.age}`, `entropy ${number(replay.entropy)}`, `ratio ${number(replay.ratio_mean)}`].map((text) => h('span', null, text)) : null,
      h('span', { class: 'quiet' }, `step ${step[visit]}`)));
  }));
}

function kindOfVisit(rows, visit) {
  return rows.visits.replayed[visit] ? KINDS.replayed : KINDS.fresh;
}

// As the recorded texts name it.
function groupName(rows, visit) {
  return `${rows.visits.step[visit]}/${rows.groupOf[visit]}`;
}

function groupAddress(rows, visit) {
  return address({ page: 'responses', group: groupName(rows, visit), question: null, find: null });
}

function visitsTable(rows, visits) {
  const { step, correctness, replayed, bucket_before, bucket_after } = rows.visits;
  const bucket = (value) => (value === null ? 'none' : String(value));
  return table(['step', 'kind', 'pass rate', 'bucket before', 'after', 'replayed one written in', 'age', 'its entropy', "others' entropies", 'mean ratio', 'largest', 'mean weight'],
    visits.map((visit) => {
      const replay = replayOfVisit(rows, visit);
      const shared = [h('a', { href: groupAddress(rows, visit) }, String(step[visit])), kindOfVisit(rows, visit),
        correctness[visit], bucket(bucket_before[visit]), bucket(bucket_after[visit])];
      if (!replay) return [...shared, ...Array(7).fill(null)];
      return [...shared, replay.written ? `step ${replay.written}` : 'before the run', replay.age, replay.entropy, replay.others, replay.ratio_mean, replay.ratio_max, replay.shaped_mean];
    }), 'Visits of this question');
}

// What is known of the stored success that a visit replayed; null where its record is lost.
function replayOfVisit(rows, visit) {
  const { replays } = rows;
  const index = rows.replayOf.get(visit);
  if (index === undefined || replays.written[index] === null) return null;
  const entropy = replays.entropy[index];
  const others = replays.candidates[index] && without(replays.candidates[index], entropy);
  return {
    written: replays.written[index], age: rows.visits.step[visit] - replays.written[index], entropy,
    others: others === null ? 'not compared' : others.length ? others.map((value) => number(value)).join(', ') : 'it was the only one',
    ratio_mean: replays.ratio_mean[index], ratio_max: replays.ratio_max[index],
    shaped_mean: replays.shaped_mean[index], times: replays.times[index],
  };
}

// The entropies of all candidates but that of the chosen one, which is the nearest to `chosen`.
function without(candidates, chosen) {
  const distances = candidates.map((value) => Math.abs((value ?? Infinity) - chosen));
  const own = distances.indexOf(Math.min(...distances));
  return candidates.filter((_, index) => index !== own);
}

// ---- What was written ----

async function solutions(run, rows, row, visits, recordings) {
  const all = await part(`stored-${run}`);
  const stored = (all && all.questions[row]) || [];
  const replays = lastReplays(rows, visits, recordings);
  const items = stored.map((solution) => {
    const own = withTexts(solution, all.pieces);
    const replay = replays.find((other) => other.written === solution.step && isSame(own, other));
    const words = [solution.step ? `Written in step ${solution.step}` : 'Written before the run',
      plural(own.texts.length, 'token'), `replayed ${plural(solution.times, 'time')}`];
    return unfold(words.join(', ') + (replay ? `; values of the replay in step ${replay.step}` : ''),
      () => tokensView(replay || own, 'ratio'), stored.length < 3);
  });
  const solved = recordedSuccesses(rows, visits, recordings);
  const [first, last] = [solved[0], solved.at(-1)];
  return [
    section('Stored successes', items.length ? items
      : h('p', { class: 'quiet' }, whyNone(rows, visits, all))),
    section('First and latest solution', first && first !== last
      ? isSame(first, last) ? h('p', { class: 'quiet' }, `In step ${last.step} it is word for word that of step ${first.step}.`) : [h('p', { class: 'quiet' }, 'From step ', String(first.step), ' to step ', String(last.step), ': ', h('del', null, 'taken away'), ' ', h('ins', null, 'added')),
        difference(first.texts.join(''), last.texts.join(''))]
      : h('p', { class: 'quiet' }, 'There are no two recorded solutions to compare.')),
  ];
}

function whyNone(rows, visits, all) {
  if (!all) return 'The newest checkpoint could not be read.';
  const isKept = rows.visits.bucket_after[visits.at(-1)] !== null;
  return isKept ? 'It is in the buffer, but there was no room for its solutions in this file, or the newest checkpoint is older than they are.'
    : 'It is not in the buffer: it was never partly solved, or has retired.';
}

// The recorded replays, the newest first.
function lastReplays(rows, visits, recordings) {
  return visits.flatMap((visit, index) => {
    const replay = recordings[index] ? replayOfVisit(rows, visit) : null;
    const response = replay && [...recordings[index].values()].find((member) => member.past);
    return response ? [{ ...response, written: replay.written, step: rows.visits.step[visit] }] : [];
  }).reverse();
}

function isSame(one, other) {
  return one.texts.join('') === other.texts.join('');
}

function recordedSuccesses(rows, visits, recordings) {
  return recordedWhere(rows, visits, recordings, (name, response) => name === 'correct' && !response.past);
}

function recordedWhere(rows, visits, recordings, isWanted) {
  const { outcomes, outcome: codes } = rows.responses;
  return visits.flatMap((visit, index) => [...(recordings[index] || [])]
    .filter(([sample, response]) => rows.visits.first[visit] >= 0 && isWanted(outcomes[codes[rows.visits.first[visit] + sample]], response))
    .map(([sample, response]) => ({ ...response, step: rows.visits.step[visit], index: rows.visits.first[visit] + sample })));
}

function replayed(rows, visits, recordings) {
  const replays = lastReplays(rows, visits, recordings);
  return section(`Replays (${replays.length} recorded)`, replays.map((replay) => unfold(
    `Step ${replay.step}: the solution of step ${replay.written}`, () => tokensView(replay, 'ratio'))),
  replays.length ? null : h('p', { class: 'quiet' }, 'No replay is recorded token by token.'));
}

function mistakes(rows, visits, recordings) {
  const wrong = recordedWhere(rows, visits, recordings, (name) => name !== 'correct');
  return section(`Not correct (${wrong.length} recorded)`, wrong.map((response) => unfold(
    h('span', null, `Step ${response.step}: `, why(rows, response.index)), () => tokensView(response, 'entropy'))),
  wrong.length ? null : h('p', { class: 'quiet' }, 'No such response is recorded token by token.'));
}

// Why a response got its verdict.
function why(rows, index) {
  const { outcomes, outcome: codes, reason } = rows.responses;
  const name = outcomes[codes[index]];
  const place = rows.place.get(rows.visits.question[rows.visitOf[index]]);
  const truth = rows.questions.answer[place];
  const words = {
    wrong: ['extracted ', h('b', null, extracted(rows, index) ?? 'nothing'), ' where the answer is ', h('b', null, truth ?? 'not recorded')],
    'no answer': ['no answer could be extracted'],
  }[name] || (reason[index] ? [reason[index]] : []);
  return [outcome(name), words.length ? ': ' : '', words, rows.responses.truncated[index] ? ' (cut at the limit)' : ''];
}
