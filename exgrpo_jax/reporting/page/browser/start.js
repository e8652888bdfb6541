// The frame around the pages: run and page selection, light and dark mode, and reloading.

const PAGES = {
  overview: overviewPage,
  buffer: bufferPage,
  question: questionPage,
  responses: responsesPage,
  evaluation: evaluationPage,
  compare: comparePage,
};

function title(name) {
  return name[0].toUpperCase() + name.slice(1);
}

function shownPage() {
  const wanted = choice().get('page');
  const fallback = page.compare ? 'compare' : 'overview';
  return wanted in PAGES && (wanted !== 'compare' || page.compare) ? wanted : fallback;
}

function header() {
  const [run, shown] = [currentRun(), shownPage()];
  const names = Object.keys(PAGES).filter((name) => name !== 'compare' || page.compare);
  const isCompared = shown === 'compare';
  const onchange = (event) => {
    location.hash = address({ run: event.target.value, page: shown }, new URLSearchParams());
  };
  const tab = (name) => {
    const href = address({ page: name }, ofRun(run));
    return h('a', { href, 'aria-current': name === shown && 'page' }, title(name));
  };
  const runs = page.runs.map(({ name }, index) => [index, name]);
  return [
    h(
      'h1',
      isCompared ? `${page.runs.length} runs` : page.runs[run].name,
      h('small', isCompared ? '' : page.runs[run].progress),
    ),
    runs.length < 2 || isCompared ? null : select('run', { id: 'run', onchange }, runs, run),
    h('nav', { 'aria-label': 'Pages' }, names.map(tab)),
    h(
      'button',
      {
        type: 'button',
        id: 'theme',
        onclick: changeTheme,
        'aria-label': 'Switch between light and dark',
      },
      '◐',
    ),
  ];
}

// Follow the system's light or dark setting until the reader changes it here.
function followSystem() {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const adopt = () => setTheme(system.matches);
  system.addEventListener('change', adopt);
  adopt();
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
  redraw();
}

function changeTheme() {
  setTheme(document.documentElement.dataset.theme !== 'dark');
}

let showing = 0;

async function show() {
  const turn = ++showing;
  const name = shownPage();
  const content = await PAGES[name](currentRun());
  if (turn !== showing) return; // another page was requested meanwhile
  document.getElementById('header').replaceChildren(...header().filter(Boolean));
  const main = document.getElementById('main');
  const isSame = main.dataset.page === name;
  const focused = isSame && document.activeElement ? document.activeElement.name : '';
  main.dataset.page = name;
  main.replaceChildren(...content.flat(Infinity).filter(Boolean));
  document.title = `${title(name)} · ${page.title}`;
  if (focused) main.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
  else if (!isSame) scrollTo(0, 0);
  for (const plot of charts)
    if (!plot.root.isConnected) {
      plot.destroy();
      charts.delete(plot);
    }
  main.dataset.ready = turn;
}

// Check for newer steps if the page is rewritten or served. Reload immediately if nobody has
// touched the page for a while; otherwise offer a button.
const UNTOUCHED = 60; // seconds

function follow() {
  if (!page.again) return;
  let touched = -Infinity;
  const touch = () => {
    touched = performance.now();
  };
  for (const event of ['pointerdown', 'keydown', 'wheel'])
    addEventListener(event, touch, { passive: true });
  setInterval(async () => {
    if (document.hidden || !(await isNewer())) return;
    if (performance.now() - touched > 1000 * UNTOUCHED) location.reload();
    else offerReload();
  }, 1000 * page.again);
}

// Return true if there may be newer steps. Only a server can tell; a file always returns true.
async function isNewer() {
  if (!page.version) return true;
  try {
    return (await (await fetch('version')).text()) !== page.version;
  } catch {
    return false;
  }
}

function offerReload() {
  if (document.getElementById('newer')) return;
  const attributes = { type: 'button', id: 'newer', onclick: () => location.reload() };
  document.getElementById('header').append(h('button', attributes, 'Show newer steps'));
}

async function start() {
  followSystem();
  page = await part('page');
  const more = page.again ? ' It checks for newer steps automatically.' : '';
  const footer = quiet(`Written ${page.written} by exgrpo_jax ${page.by}.`, more);
  document.getElementById('footer').replaceChildren(footer);
  addEventListener('hashchange', show);
  await show();
  follow();
}

start();
