// A run's responses: a table of the responses that pass the filters, and a view of one group with
// its advantages and tokens.

const ROWS = 50; // rows per page of the table
const EXCERPT = 160; // characters per text in the table
const BEFORE = 40; // characters shown before the words found
const KINDS = { fresh: '●\u00a0fresh', replayed: '↻\u00a0replayed' };

async function responsesPage(run) {
  const rows = await recorded(run);
  if (!rows || !rows.visits) return [notes(page.runs[run].missing)];
  const group = choice().get('group');
  if (group) return groupView(run, rows, ...group.split('/').map(Number));
  const [count, list] = [h('p', { id: 'count', 'aria-live': 'polite' }), h('div')];
  let turn = 0;
  const update = async () => {
    const own = ++turn;
    await readTexts(run, rows);
    if (own !== turn) return; // the filters have changed meanwhile
    const found = chosen(rows);
    count.replaceChildren(...(found.length ? summary(rows, found) : nothingFound(rows)));
    list.replaceChildren(...[whatIsHere(rows), ...listed(rows, found)].filter(Boolean));
  };
  await update();
  return [filters(rows, update), count, list];
}

// Read the response texts in this file. If a single step is chosen, also read its texts from the
// files next to this one or from the server. A missing text is null.
async function readTexts(run, rows) {
  rows.texts ??= rows.responses.length.map(() => null);
  if (!rows.hasTexts) addTexts(rows, await part(`texts-${run}`));
  rows.hasTexts = true;
  const [from, to] = ['from', 'to'].map((name) => Number(choice().get(name)));
  if (page.texts && from === to && rows.recorded.includes(from))
    addTexts(rows, await textsOf(run, from));
}

function addTexts(rows, found) {
  if (!found) return;
  rows.visits.first.forEach((first, visit) => {
    const members = first < 0 ? null : found.groups[groupName(rows, visit)];
    for (const { sample, pieces } of members || [])
      rows.texts[first + sample] = pieces.map((piece) => found.pieces[piece]).join('');
  });
}

// Explain which of the run's responses and texts are listed, if some are missing.
function whatIsHere(rows) {
  const count = rows.texts.filter((text) => text !== null).length;
  const all = rows.texts.length;
  const { cut } = rows.questions;
  const sentences = [
    rows.every > 1 &&
      `This file contains the responses of one step in ${rows.every}, plus the groups shown token by token. A served page (--serve) contains all responses.`,
    count < all &&
      `This file contains the texts of ${number(count)} of the ${plural(all, 'response')}: as many groups recorded token by token (config.metrics.recorded_groups) as fit.`,
    count < all &&
      (page.texts
        ? 'If you choose a single step, the page loads all of its recorded texts.'
        : 'With --texts=all, the page includes every recorded text.'),
    cut > 0 &&
      `For ${number(cut)} of the ${plural(rows.questions.row.length, 'question')}, this file contains only the beginning of the text.`,
  ].filter(Boolean);
  return sentences.length > 0 && quiet(sentences.join(' '));
}

// ---- The table ----

function listed(rows, found) {
  if (!found.length) return [];
  const at = Math.max(0, Math.min(Number(choice().get('at') || 0), found.length - 1));
  return [
    table(
      'step|group|question|response|kind|outcome|extracted|reward|advantage|tokens|entropy',
      found.slice(at, at + ROWS).map((i) => responseRow(rows, i)),
      'Responses',
      'cards',
    ),
    h(
      'nav.pages',
      { 'aria-label': 'Pages of the table' },
      at > 0 && h('a', { href: address({ at: Math.max(0, at - ROWS) }) }, '← previous'),
      ` ${number(at + 1)} to ${number(Math.min(at + ROWS, found.length))} `,
      at + ROWS < found.length && h('a', { href: address({ at: at + ROWS }) }, 'next →'),
    ),
  ];
}

// Summarize the responses found: their number, their groups' outcomes, and means.
function summary(rows, found) {
  const { responses, visits, visitOf } = rows;
  const groups = [...new Set(found.map((i) => visitOf[i]))];
  const rates = groups.map((visit) => visits.correctness[visit]);
  const counts = {
    'all solved': rates.filter((rate) => rate === 1).length,
    'partly solved': rates.filter((rate) => rate > 0 && rate < 1).length,
    'none solved': rates.filter((rate) => rate === 0).length,
  };
  const occurring = Object.entries(counts).filter(([, count]) => count);
  const fates = occurring.map(([words, count]) => `${number(count)} ${words}`).join(', ');
  const mean = (name) =>
    number(found.reduce((sum, i) => sum + (responses[name][i] ?? 0), 0) / found.length);
  return [
    h('b', plural(found.length, 'response')),
    ` of ${plural(rates.length, 'group')} (${fates}): mean reward ${mean('reward')}, length ${mean('length')}, entropy ${mean('entropy')}`,
  ];
}

function responseRow(rows, i) {
  const visit = rows.visitOf[i];
  const { responses } = rows;
  const question = rows.visits.question[visit];
  const text = rows.questions.text[rows.place.get(question)];
  const [step, group] = [rows.visits.step[visit], rows.groupOf[visit]];
  const label = `group ${group} of step ${step}`;
  return [
    step,
    h('a', { href: groupAddress(rows, visit), 'aria-label': label }, `group\u00a0${group}`),
    h('div.text', questionLink(question), ' ', excerpt(text, 'text not recorded')),
    h('div.text', responseText(`${step}/${group}/${i - rows.visits.first[visit]}`, rows.texts[i])),
    kindOf(responses.replayed[i]),
    h('span', outcome(outcomeOf(rows, i)), cutMark(rows, i)),
    ...[answerOf(rows, i), responses.reward[i], signed(responses.advantage[i])],
    ...[responses.length[i], responses.entropy[i]],
  ];
}

// A response in the table: its beginning, and the full text on demand.
function responseText(key, text) {
  return text === null || text.length <= EXCERPT
    ? excerpt(text, 'not in this file')
    : unfold(key, excerpt(text), () => h('div.tokens', text));
}

// The beginning of a text, or the part around the searched words, which are highlighted.
function excerpt(text, otherwise) {
  if (text === null) return h('span.quiet', otherwise);
  const wanted = words();
  const place = wanted ? text.toLowerCase().indexOf(wanted) : -1;
  const start = Math.max(0, Math.min(place - BEFORE, text.length - EXCERPT));
  const end = Math.max(start + EXCERPT, place + wanted.length);
  const [from, to] = place < 0 ? [end, end] : [place, place + wanted.length];
  return h(
    'span.excerpt',
    ...[start > 0 && '… ', text.slice(start, from)],
    to > from && h('mark', text.slice(from, to)),
    ...[text.slice(to, end), end < text.length && ' …'],
  );
}

function kindOf(isReplayed) {
  return isReplayed ? KINDS.replayed : KINDS.fresh;
}

function outcomeOf(rows, i) {
  return rows.responses.outcomes[rows.responses.outcome[i]];
}

function cutMark(rows, i) {
  return rows.responses.truncated[i] ? ' (truncated)' : '';
}

function answerOf(rows, i) {
  return h('span.excerpt', extracted(rows, i) ?? MISSING);
}

// The answer that the verifier extracted; true stands for the question's ground truth.
function extracted(rows, i) {
  const own = rows.responses.answer[i];
  return own === true ? truthOf(rows, i) : own;
}

function truthOf(rows, i) {
  return rows.questions.answer[rows.place.get(rows.visits.question[rows.visitOf[i]])];
}

// ---- A group ----

async function groupView(run, rows, step, group) {
  const visit = rows.visits.step.findIndex(
    (value, index) => value === step && rows.groupOf[index] === group,
  );
  if (visit < 0) return [h('p', `Step ${step} has no group ${group}.`)];
  const question = rows.visits.question[visit];
  const texts = await recordedGroup(run, step, group);
  const count = rows.visits.responses[visit]; // 0 if they are not in this file
  const members = Array.from({ length: count }, (_, i) => rows.visits.first[visit] + i);
  const tokensOf = (i, sample) => {
    if (!texts.has(sample)) return null;
    const isReplayed = Boolean(rows.responses.replayed[i]);
    const make = (key) => tokensView(texts.get(sample), isReplayed ? 'ratio' : 'entropy', key);
    const title = h('span', `Sample ${sample}, ${kindOf(isReplayed)}: `, why(rows, i));
    return unfold(sample, title, make, sample === 0 || isReplayed);
  };
  return [
    h('p', h('a', { href: address({ group: null }) }, '← all responses')),
    h('h2', `Step ${step}, group ${group}: question `, questionLink(question)),
    h('blockquote.question', questionText(rows, question)),
    h(
      'p',
      'Answer: ',
      h('b', rows.questions.answer[rows.place.get(question)] ?? 'not recorded'),
      `, pass rate ${number(rows.visits.correctness[visit])}`,
    ),
    count
      ? groupTable(rows, members)
      : h('p.notes', 'The responses from this step are not in this file.'),
    texts
      ? h('div', members.map(tokensOf))
      : h(
          'p.notes',
          'This group was not recorded token by token (config.metrics.recorded_groups), or it ' +
            'did not fit into this file (--texts=all includes everything recorded).',
        ),
  ];
}

function groupTable(rows, members) {
  const { responses } = rows;
  const most = Math.max(1e-9, ...members.map((i) => Math.abs(responses.advantage[i])));
  return table(
    'sample|kind|outcome|extracted|reward|advantage|tokens|entropy|written in step|' +
      'mean ratio|largest ratio',
    members.map((i, sample) => {
      const replay = responses.replayed[i] ? replayOfVisit(rows, rows.visitOf[i]) : null;
      const bar = h(`i.advantage.${responses.advantage[i] < 0 ? 'negative' : 'positive'}`);
      bar.style.width = `${Math.round((40 * Math.abs(responses.advantage[i])) / most)}px`;
      return [
        ...[sample, kindOf(responses.replayed[i]), outcome(outcomeOf(rows, i)), answerOf(rows, i)],
        ...[responses.reward[i], h('span.with-bar', bar, signed(responses.advantage[i]))],
        ...[responses.length[i], responses.entropy[i]],
        ...(replay ? [replay.written, replay.ratio_mean, replay.ratio_max] : [null, null, null]),
      ];
    }),
    'Responses in the group',
    'cards',
  );
}
