// The data in the file, and the reader's choices. The URL after # contains all choices, so that a
// copied link opens the same view and a reload loses nothing.

const parts = {};

// A part of the data: compressed JSON in base64, read from this file or from the server when it is
// first needed.
function part(name) {
  if (!(name in parts)) parts[name] = load(name);
  return parts[name];
}

async function load(name) {
  const element = document.getElementById(`part-${name}`);
  if (element) return unpack(element.textContent);
  if (!page.parts?.[name]) return null;
  try {
    return await unpack(await (await fetch(`parts/${name}`)).text());
  } catch {
    delete parts[name]; // the server has stopped; it may come back
    return null;
  }
}

// Show newer data. The other parts will be read again only if they have changed.
function adopt(newer) {
  for (const name of Object.keys(parts))
    if (!newer.parts[name] || newer.parts[name] !== page.parts[name]) delete parts[name];
  page = newer;
}

// What the reader opened and chose, except for the choices in the URL. It survives updates.
const kept = new Map();

function keyInView(key) {
  return ['run', 'page', 'question', 'group', 'benchmark'].map((name) => choice().get(name)) + key;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

// A step's texts, from a file next to this one or from the server.
const waiting = {};

function exgrpoTexts(name, text) {
  waiting[name](unpack(text));
}

function textsOf(run, step) {
  const name = `${run}/${step}`;
  const key = `texts ${name}`;
  if (!(key in parts)) {
    parts[key] = new Promise((resolve) => {
      waiting[name] = resolve;
      const file = `${page.texts}${run}_${String(step).padStart(6, '0')}.js`;
      document.body.append(h('script', { src: file, onerror: () => resolve(null) }));
    });
  }
  return parts[key];
}

let page = null;

function choice() {
  return new URLSearchParams(location.hash.slice(1));
}

// The URL with some choices changed; null removes a choice.
function address(changes, from = choice()) {
  const next = new URLSearchParams(from);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === '') next.delete(name);
    else next.set(name, value);
  }
  return `#${next}`;
}

// Only the choice of run, without any others.
function ofRun(run = choice().get('run') || 0) {
  return new URLSearchParams({ run });
}

function link(changes, ...content) {
  return h('a', { href: address(changes, ofRun()) }, ...content);
}

// The URL of all responses from a step.
function stepAddress(step) {
  return address({ page: 'responses', from: step, to: step }, ofRun());
}

function currentRun() {
  const index = Number(choice().get('run') || 0);
  return page.runs[index] ? index : 0;
}

// A run's visits, responses and replays, with maps between them.
async function recorded(run) {
  const rows = await part(`visits-${run}`);
  if (!rows || !rows.visits || rows.ofQuestion) return rows;
  rows.ofQuestion = new Map();
  rows.visits.question.forEach((question, visit) => {
    if (!rows.ofQuestion.has(question)) rows.ofQuestion.set(question, []);
    rows.ofQuestion.get(question).push(visit);
  });
  rows.visitOf = new Int32Array(rows.responses.length.length);
  rows.visits.first.forEach((first, visit) => {
    if (first >= 0) rows.visitOf.fill(visit, first, first + rows.visits.responses[visit]);
  });
  rows.replayOf = new Map();
  rows.visits.replayed.forEach((flag, visit) => {
    if (flag) rows.replayOf.set(visit, rows.replayOf.size);
  });
  rows.place = new Map(rows.questions.row.map((row, place) => [row, place]));
  const { step } = rows.visits;
  rows.groupOf = new Int32Array(step.length); // each visit's index within its step
  for (let visit = 1; visit < step.length; visit++)
    rows.groupOf[visit] = step[visit] === step[visit - 1] ? rows.groupOf[visit - 1] + 1 : 0;
  rows.steps = [...new Set(step.filter((_, visit) => rows.visits.first[visit] >= 0))];
  return rows;
}
