// A response token by token, and the difference between two responses.

const NATS = [0.05, 0.2, 0.5, 1, 1.8]; // lower limits of the entropy levels above the first
const RATIOS = [0.05, 0.2, 0.7]; // lower limits of the |log-ratio| levels above the first

function levelOf(value, limits) {
  return limits.filter((limit) => value >= limit).length;
}

// What token colors can mean; `of` names the values that a response must have for this meaning.
const MEANINGS = {
  entropy: {
    title: 'entropy',
    of: 'entropy',
    level: (response, index) => `entropy-${levelOf(response.entropy[index] ?? 0, NATS)}`,
    legend: () => natsLegend('Entropy in nats: '),
  },
  ratio: {
    title: 'log importance ratio',
    of: 'past',
    level: (response, index) => {
      const ratio = logRatio(response, index);
      return `ratio-${ratio < 0 ? 'down' : 'up'}-${levelOf(Math.abs(ratio), RATIOS)}`;
    },
    legend: () =>
      h(
        'p.legend',
        'log(π now / π past): ',
        RATIOS.map((limit, at) => h(`span.token.ratio-down-${at + 1}`, `≤ −${limit}`)).reverse(),
        h('span.token', 'about 0'),
        RATIOS.map((limit, at) => h(`span.token.ratio-up-${at + 1}`, `≥ ${limit}`)),
      ),
  },
  logp: {
    title: 'log-probability',
    of: 'logp',
    level: (response, index) => `entropy-${levelOf(-(response.logp[index] ?? 0), NATS)}`,
    legend: () => natsLegend('Negative log-probability in nats: '),
  },
};

function natsLegend(title) {
  const levels = [0, ...NATS].map((limit, level) =>
    h(`span.token.entropy-${level}`, level ? `≥ ${limit}` : `< ${NATS[0]}`),
  );
  return h('p.legend', title, levels);
}

function logRatio(response, index) {
  return (response.logp[index] ?? 0) - (response.past[index] ?? 0);
}

// For each token of an episode: its turn, and whether it comes from the policy.
function turnsOf(response) {
  return (response.turns || []).flatMap(([written, observed, reward], turn) =>
    Array.from({ length: written + observed }, (_, index) => ({
      isOwn: index < written,
      begins: index === 0 || index === written,
      said: index < written ? `turn ${turn + 1}, reward ${number(reward)}` : 'environment',
    })),
  );
}

// Colored tokens, with a menu for the colors' meaning. Arrow keys move from token to token.
function tokensView(response, wanted, key) {
  const possible = Object.keys(MEANINGS).filter((name) => response[MEANINGS[name].of]);
  let meaning = kept.get(`${key} color`) ?? (possible.includes(wanted) ? wanted : possible[0]);
  const status = h('p.readout', { 'aria-live': 'polite' });
  const legend = h('div');
  const spans = response.texts.map((text) => h('span.token', text.replace(/\n/g, '↵\n')));
  const places = turnsOf(response);
  const isOwn = (index) => !places[index] || places[index].isOwn;
  const withSpeakers = spans.flatMap((span, index) =>
    places[index]?.begins ? [h('span.speaker', places[index].said), span] : [span],
  );
  const label = 'Response tokens; move with the arrow keys';
  const text = h('div.tokens', { tabindex: 0, role: 'group', 'aria-label': label }, withSpeakers);
  const paint = () => {
    spans.forEach((span, index) => {
      const level = meaning ? MEANINGS[meaning].level(response, index) : '';
      span.className = `token ${isOwn(index) ? level : 'observed'}`;
    });
    legend.replaceChildren(meaning ? MEANINGS[meaning].legend() : '');
  };
  let at = -1;
  const go = (index) => {
    if (spans[at]) spans[at].classList.remove('at');
    at = index;
    kept.set(`${key} token`, at);
    spans[at].classList.add('at');
    status.textContent = describeToken(response, at, isOwn(at));
  };
  text.addEventListener('pointerover', (event) => {
    const index = spans.indexOf(event.target);
    if (index >= 0) go(index);
  });
  text.addEventListener('keydown', (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    go(Math.min(Math.max(at + step, 0), spans.length - 1));
    event.preventDefault();
  });
  paint();
  if (spans[kept.get(`${key} token`)]) go(kept.get(`${key} token`));
  const choose = (event) => {
    meaning = event.target.value;
    kept.set(`${key} color`, meaning);
    paint();
  };
  const options = possible.map((name) => [name, MEANINGS[name].title]);
  const menu = options.length > 1 && select('Color by', { onchange: choose }, options, meaning);
  return h('div.response', menu, legend, text, status);
}

function describeToken(response, index, isOwn) {
  const { texts, entropy, logp, past } = response;
  const place = `token ${index + 1} of ${texts.length}: ${JSON.stringify(texts[index])}`;
  const values = isOwn
    ? [
        entropy && `entropy ${number(entropy[index])}`,
        logp && `log-probability ${number(logp[index])}`,
        past && `past log-probability ${number(past[index])}`,
        past && `log importance ratio ${signed(logRatio(response, index))}`,
      ]
    : ['written by the environment'];
  return [place, ...values].filter(Boolean).join(' · ');
}

// A recorded response, with the text of each token.
function withTexts(response, pieces) {
  return { ...response, texts: response.pieces.map((piece) => pieces[piece]) };
}

// The recorded responses of a group by sample; null if they are not recorded.
async function recordedGroup(run, step, group) {
  const key = `${step}/${group}`;
  let found = await part(`texts-${run}`);
  if (!found?.groups[key]) {
    const { recorded: steps } = await recorded(run);
    found = page.texts && steps.includes(step) ? await textsOf(run, step) : null;
  }
  const members = found?.groups[key]?.map((one) => [one.sample, withTexts(one, found.pieces)]);
  return members ? new Map(members) : null;
}

// ---- Differences ----

const MOST_CELLS = 4e6; // size limit of the table for the longest common subsequence

// Removed and added words as <del> and <ins>, which browsers strike through and underline.
function difference(before, after) {
  const [a, b] = [before, after].map((text) => text.match(/\s+|[\p{L}\p{N}_.]+|[^\s]/gu) || []);
  if (a.length * b.length > MOST_CELLS) {
    return quiet('These two texts are too long to compare here.');
  }
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * width + j] =
        a[i] === b[j]
          ? common[(i + 1) * width + j + 1] + 1
          : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const shown = h('div.tokens.difference');
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      shown.append(a[i]);
      i++;
      j++;
    } else if (
      j >= b.length ||
      (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])
    ) {
      shown.append(h('del', a[i++]));
    } else {
      shown.append(h('ins', b[j++]));
    }
  }
  return shown;
}
