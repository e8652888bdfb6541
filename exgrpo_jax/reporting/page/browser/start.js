// The frame around the pages: run and page selection, light and dark mode, and updates.

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

const states = h('p', { id: 'states', role: 'status' }); // what the runs are doing, if served

function header() {
  if (!page.runs.length) return [h('h1', page.title), states];
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
  const { name, progress } = page.runs[run];
  const label = 'Switch between light and dark';
  const onclick = () => setTheme(!isDark());
  return [
    h('h1', ...(isCompared ? [`${page.runs.length} runs`] : [name, h('small', progress)])),
    runs.length > 1 && !isCompared && select('run', { id: 'run', onchange }, runs, run),
    h('nav', { 'aria-label': 'Pages' }, names.map(tab)),
    h('button', { type: 'button', id: 'theme', onclick, 'aria-label': label }, '◐'),
    page.parts && states,
  ];
}

function isDark() {
  return document.documentElement.dataset.theme === 'dark';
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? 'dark' : 'light';
  for (const plot of charts) plot.redraw();
}

let showing = 0;

async function show(isUpdate = false) {
  const turn = ++showing;
  const name = shownPage();
  const content = page.runs.length
    ? await PAGES[name](currentRun())
    : [quiet('The report appears here after the first step.')];
  if (turn !== showing) return; // another page was requested meanwhile
  const main = document.getElementById('main');
  const isSame = main.dataset.page === name;
  const comeBack = isSame && bookmark(isUpdate);
  if (isUpdate) rememberPointed();
  else pointed = {};
  document.getElementById('header').replaceChildren(...header().filter(Boolean));
  main.dataset.page = name;
  main.replaceChildren(...content.flat(Infinity).filter(Boolean));
  document.title = `${title(name)} · ${page.title}`;
  const written = page.written && quiet(`Written ${page.written} by exgrpo_jax ${page.by}.`);
  document.getElementById('footer').replaceChildren(written || '');
  if (comeBack) comeBack();
  else scrollTo(0, 0);
  for (const plot of charts)
    if (!plot.root.isConnected) {
      plot.destroy();
      charts.delete(plot);
    }
  main.dataset.ready = turn;
}

// Remember the focus and, for an update, all scroll positions. The returned function restores them
// in the new content.
function bookmark(isUpdate) {
  const label = (one) =>
    one.id || one.name || one.ariaLabel || one.getAttribute('href') || one.textContent;
  const isShown = (one) => !one.closest('details:not([open]) > :not(summary)');
  // An old and a new element match if they have the same label and the same place among elements
  // with this label.
  const finder = (old) => {
    const all = () => [...document.querySelectorAll(old.tagName)].filter(isShown);
    const alike = () => all().filter((one) => label(one) === label(old));
    const place = alike().indexOf(old);
    return () => alike()[place];
  };
  const steps = [];
  const focused = document.activeElement;
  if (focused !== document.body) {
    const [again, caret] = [finder(focused), focused.selectionStart ?? null];
    steps.push(() => {
      again()?.focus({ preventScroll: true });
      if (caret !== null) again()?.setSelectionRange?.(caret, focused.selectionEnd);
    });
  }
  const main = document.getElementById('main');
  for (const box of isUpdate ? main.querySelectorAll('[tabindex]') : []) {
    const [again, { scrollLeft, scrollTop }] = [finder(box), box];
    if (scrollLeft || scrollTop)
      steps.push(() => Object.assign(again() ?? {}, { scrollLeft, scrollTop }));
  }
  // Content above the window may grow, so keep the first visible title where it is.
  const top = (one) => one.getBoundingClientRect().top;
  const first =
    isUpdate && [...main.querySelectorAll('h2, h3, summary')].find((one) => top(one) >= 0);
  if (first) {
    const [again, before] = [finder(first), top(first)];
    steps.push(() => again() && scrollBy(0, top(again()) - before));
  }
  return () => steps.forEach((step) => step());
}

// ---- Updates of a served page ----

const PAUSE = 3; // seconds without input before an update, which may disturb a reader

async function follow() {
  let touched = -Infinity;
  const touch = () => {
    touched = performance.now();
  };
  for (const event of ['pointerdown', 'pointerup', 'keydown', 'wheel', 'touchmove'])
    addEventListener(event, touch, { passive: true });
  addEventListener('pointermove', (event) => event.buttons && touch());
  const isBusy = () => performance.now() - touched < 1000 * PAUSE || !getSelection().isCollapsed;
  for (;;) {
    if (!document.hidden) await askForNews();
    if (newer && isBusy()) offerUpdate();
    else if (newer) await update();
    await new Promise((wake) => setTimeout(wake, 1000 * page.again));
  }
}

let newer = null; // data newer than the page shows

// Show what the runs are doing, and read newer data if there is any.
async function askForNews() {
  try {
    const have = encodeURIComponent((newer ?? page).version);
    const news = await (await fetch(`news?have=${have}`)).json();
    if (news.page) newer = await unpack(news.page);
    page.again = news.again;
    say(news.states);
  } catch {
    say([['stopped', 'The server does not answer. Run exgrpo report --serve again.']]);
  }
}

function update() {
  if (newer) adopt(newer);
  newer = null;
  return show(true);
}

// Replace the line about the runs only if its text changes, because screen readers announce it.
function say(all) {
  const lines = h('p', ...all.map(([kind, text]) => h(`span.${kind}`, text)));
  if (lines.innerHTML !== states.innerHTML) states.replaceChildren(...lines.children);
}

function offerUpdate() {
  if (document.getElementById('newer')) return;
  const attributes = { type: 'button', id: 'newer', onclick: update };
  document.getElementById('header').append(h('button', attributes, 'Show newer steps'));
}

async function start() {
  // Follow the system's light or dark setting until the reader changes it here.
  const system = matchMedia('(prefers-color-scheme: dark)');
  const adopt = () => setTheme(system.matches);
  system.addEventListener('change', adopt);
  adopt();
  let wasDark = false;
  addEventListener('beforeprint', () => {
    wasDark = isDark();
    setTheme(false); // paper is white
  });
  addEventListener('afterprint', () => setTheme(wasDark));
  page = await part('page');
  addEventListener('hashchange', () => show());
  await show();
  if (page.parts) follow();
}

start();
