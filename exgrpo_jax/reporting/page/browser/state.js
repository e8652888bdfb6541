// The data in the file, and the reader's choices. The URL after # contains all choices, so that a
// copied link opens the same view and a reload loses nothing.

const parts = {};

// A part of the data: compressed JSON in base64, read when it is first needed.
function part(name) {
  if (!(name in parts)) {
    const element = document.getElementById(`part-${name}`);
    parts[name] = element ? unpack(element.textContent) : Promise.resolve(null);
  }
  return parts[name];
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
  rows.replayOf = replaysOf(rows.visits.replayed);
  rows.place = new Map(rows.questions.row.map((row, place) => [row, place]));
  rows.groupOf = groupsOf(rows.visits.step);
  rows.steps = [...new Set(rows.visits.step.filter((_, visit) => rows.visits.first[visit] >= 0))];
  return rows;
}

// Map each visit with a replay to the replay's index.
function replaysOf(replayed) {
  const places = new Map();
  replayed.forEach((flag, visit) => {
    if (flag) places.set(visit, places.size);
  });
  return places;
}

// The index of each visit within its step.
function groupsOf(steps) {
  const groups = new Int32Array(steps.length);
  for (let visit = 1; visit < steps.length; visit++) {
    groups[visit] = steps[visit] === steps[visit - 1] ? groups[visit - 1] + 1 : 0;
  }
  return groups;
}
