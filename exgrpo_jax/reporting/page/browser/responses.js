// All responses of a run: a table that is filtered, and a group with its advantages and tokens.

const ROWS = 50; // of a page of the table
const FILTERS = [
  'from',
  'to',
  'outcome',
  'kind',
  'truncated',
  'reward',
  'shortest',
  'longest',
  'texts',
];
const KINDS = { fresh: '●\u00a0fresh', replayed: '↻\u00a0replayed' };
const SORTS = ['step', 'reward', 'length', 'entropy', 'advantage'];

async function responsesPage(run) {
  const rows = await recorded(run);
  if (!rows || !rows.visits) return [notes(page.runs[run].missing)];
  const group = choice().get('group');
  if (group) return groupView(run, rows, ...group.split('/').map(Number));
  return [
    rows.every > 1
      ? h(
          'p',
          { class: 'notes' },
          `Of one step in ${rows.every} the responses are in this file, besides the groups that it has token by token; a served page (--serve) has all.`,
        )
      : null,
    filters(rows),
    results(rows, await part(`texts-${run}`)),
  ];
}

// ---- Filters ----

function filters(rows) {
  const now = choice();
  const set = (name) => (event) => {
    location.hash = address({ [name]: event.target.value, at: null });
  };
  const field = (name, title, attributes) =>
    h(
      'label',
      null,
      `${title} `,
      h('input', {
        name,
        type: 'number',
        value: now.get(name) || '',
        onchange: set(name),
        ...attributes,
      }),
    );
  const select = (name, title, options, otherwise = 'any') =>
    h(
      'label',
      null,
      `${title} `,
      h(
        'select',
        { name, onchange: set(name) },
        [['', otherwise], ...options].map(([value, text]) =>
          h('option', { value, selected: value === (now.get(name) || '') }, text),
        ),
      ),
    );
  return h(
    'form',
    { class: 'filters', 'aria-label': 'Filters', onsubmit: (event) => event.preventDefault() },
    field('from', 'step from', { min: 1 }),
    field('to', 'to', { min: 1 }),
    select(
      'outcome',
      'outcome',
      rows.responses.outcomes.map((name) => [name, name]),
    ),
    select('kind', 'kind', [
      ['fresh', 'fresh'],
      ['replayed', 'replayed'],
    ]),
    select('truncated', 'truncated', [
      ['yes', 'yes'],
      ['no', 'no'],
    ]),
    field('reward', 'reward', { step: 'any' }),
    field('shortest', 'tokens from', { min: 1 }),
    field('longest', 'to', { min: 1 }),
    select('texts', 'token by token', [['yes', 'in this file']]),
    select(
      'sort',
      'sorted by',
      SORTS.flatMap((name) => [
        [name, name],
        [`-${name}`, `${name}, falling`],
      ]).slice(1),
      'step',
    ),
    h(
      'a',
      { href: address(Object.fromEntries([...FILTERS, 'sort', 'at'].map((name) => [name, null]))) },
      'Clear',
    ),
  );
}

function chosen(rows, texts) {
  const now = choice();
  const has = (name) => now.get(name) !== null && now.get(name) !== '';
  const limit = (name) => Number(now.get(name));
  const { responses, visits, visitOf } = rows;
  const outcomeCode = responses.outcomes.indexOf(now.get('outcome'));
  const tests = [];
  if (has('from')) tests.push((i) => visits.step[visitOf[i]] >= limit('from'));
  if (has('to')) tests.push((i) => visits.step[visitOf[i]] <= limit('to'));
  if (has('outcome')) tests.push((i) => responses.outcome[i] === outcomeCode);
  if (has('kind'))
    tests.push((i) => Boolean(responses.replayed[i]) === (now.get('kind') === 'replayed'));
  if (has('truncated'))
    tests.push((i) => Boolean(responses.truncated[i]) === (now.get('truncated') === 'yes'));
  if (has('reward')) tests.push((i) => Math.abs(responses.reward[i] - limit('reward')) < 1e-6);
  if (has('shortest')) tests.push((i) => responses.length[i] >= limit('shortest'));
  if (has('longest')) tests.push((i) => responses.length[i] <= limit('longest'));
  if (has('texts'))
    tests.push((i) => texts !== null && groupName(rows, visitOf[i]) in texts.groups);
  const found = [];
  for (let i = 0; i < responses.length.length; i++)
    if (tests.every((test) => test(i))) found.push(i);
  return sorted(rows, found, now.get('sort') || 'step');
}

function sorted(rows, found, wanted) {
  const name = wanted.replace('-', '');
  if (wanted === 'step') return found;
  const sign = wanted.startsWith('-') ? -1 : 1;
  const key =
    name === 'step'
      ? (i) => rows.visits.step[rows.visitOf[i]]
      : (i) => rows.responses[name][i] ?? -Infinity;
  return found.sort((a, b) => sign * (key(a) - key(b)) || a - b);
}

// ---- The table ----

function results(rows, texts) {
  const found = chosen(rows, texts);
  const at = Math.max(0, Math.min(Number(choice().get('at') || 0), found.length - 1));
  const { responses } = rows;
  const mean = (name) =>
    number(found.reduce((sum, i) => sum + (responses[name][i] ?? 0), 0) / found.length);
  const summary = found.length
    ? `: mean reward ${mean('reward')}, length ${mean('length')}, entropy ${mean('entropy')}`
    : '';
  return h(
    'div',
    null,
    h(
      'p',
      { id: 'count', 'aria-live': 'polite' },
      h('b', null, plural(found.length, 'response')),
      summary,
    ),
    table(
      [
        'step',
        'question',
        'group',
        'kind',
        'outcome',
        'extracted',
        'reward',
        'advantage',
        'tokens',
        'entropy',
        'cut',
      ],
      found.slice(at, at + ROWS).map((i) => responseRow(rows, i)),
      'Responses',
    ),
    h(
      'nav',
      { class: 'pages', 'aria-label': 'Pages of the table' },
      at > 0 ? h('a', { href: address({ at: Math.max(0, at - ROWS) }) }, '← previous') : null,
      ` ${number(at + Math.min(1, found.length))} to ${number(Math.min(at + ROWS, found.length))} `,
      at + ROWS < found.length ? h('a', { href: address({ at: at + ROWS }) }, 'next →') : null,
    ),
  );
}

function responseRow(rows, i) {
  const visit = rows.visitOf[i];
  const { responses } = rows;
  return [
    rows.visits.step[visit],
    questionLink(rows.visits.question[visit]),
    h(
      'a',
      {
        href: groupAddress(rows, visit),
        'aria-label': `group ${rows.groupOf[visit]} of step ${rows.visits.step[visit]}`,
      },
      `group\u00a0${rows.groupOf[visit]}`,
    ),
    kindOf(rows, i),
    outcomeOf(rows, i),
    answerOf(rows, i),
    responses.reward[i],
    signed(responses.advantage[i]),
    responses.length[i],
    responses.entropy[i],
    responses.truncated[i] ? 'yes' : 'no',
  ];
}

function kindOf(rows, i) {
  return rows.responses.replayed[i] ? KINDS.replayed : KINDS.fresh;
}

function outcomeOf(rows, i) {
  return outcome(rows.responses.outcomes[rows.responses.outcome[i]]);
}

function answerOf(rows, i) {
  return h('span', { class: 'excerpt' }, extracted(rows, i) ?? MISSING);
}

// What the verifier extracted; true stands for the question's own answer.
function extracted(rows, i) {
  const own = rows.responses.answer[i];
  return own === true
    ? rows.questions.answer[rows.place.get(rows.visits.question[rows.visitOf[i]])]
    : own;
}

// ---- A group ----

async function groupView(run, rows, step, group) {
  const visit = rows.visits.step.findIndex(
    (value, index) => value === step && rows.groupOf[index] === group,
  );
  if (visit < 0) return [h('p', null, `Step ${step} has no group ${group}.`)];
  const first = rows.visits.first[visit];
  const question = rows.visits.question[visit];
  const texts = await recordedGroup(run, step, group);
  const members =
    first < 0
      ? []
      : Array.from({ length: rows.visits.responses[visit] }, (_, sample) => first + sample);
  return [
    h('p', null, h('a', { href: address({ group: null }) }, '← all responses')),
    h('h2', null, `Step ${step}, group ${group}: question `, questionLink(question)),
    h('blockquote', { class: 'question' }, questionText(rows, question)),
    h(
      'p',
      null,
      'Answer: ',
      h('b', null, rows.questions.answer[rows.place.get(question)] ?? 'not recorded'),
      `, pass rate ${number(rows.visits.correctness[visit])}`,
    ),
    members.length
      ? groupTable(rows, members)
      : h('p', { class: 'notes' }, 'The responses of this step are not in this file.'),
    texts
      ? null
      : h(
          'p',
          { class: 'notes' },
          'This group was not recorded token by token (config.metrics.recorded_groups), or there was no room ' +
            'for it in this file (--texts=all has all that is recorded).',
        ),
    texts
      ? h(
          'div',
          null,
          members.map((i, sample) =>
            texts.has(sample)
              ? unfold(
                  h('span', null, `Sample ${sample}, ${kindOf(rows, i)}: `, why(rows, i)),
                  () =>
                    tokensView(texts.get(sample), rows.responses.replayed[i] ? 'ratio' : 'entropy'),
                  sample === 0 || Boolean(rows.responses.replayed[i]),
                )
              : null,
          ),
        )
      : null,
  ];
}

function groupTable(rows, members) {
  const { responses } = rows;
  const most = Math.max(1e-9, ...members.map((i) => Math.abs(responses.advantage[i])));
  return table(
    [
      'sample',
      'kind',
      'outcome',
      'extracted',
      'reward',
      'advantage',
      'tokens',
      'entropy',
      'written in step',
      'mean ratio',
      'largest',
    ],
    members.map((i, sample) => {
      const replay = responses.replayed[i] ? replayOfVisit(rows, rows.visitOf[i]) : null;
      const bar = h('i', {
        class: `advantage ${responses.advantage[i] < 0 ? 'negative' : 'positive'}`,
      });
      bar.style.width = `${Math.round((40 * Math.abs(responses.advantage[i])) / most)}px`;
      return [
        sample,
        kindOf(rows, i),
        outcomeOf(rows, i),
        answerOf(rows, i),
        responses.reward[i],
        h('span', { class: 'with-bar' }, signed(responses.advantage[i]), bar),
        responses.length[i],
        responses.entropy[i],
        ...(replay ? [replay.written, replay.ratio_mean, replay.ratio_max] : [null, null, null]),
      ];
    }),
    'Responses of the group',
  );
}
