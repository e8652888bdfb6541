// Elements, numbers and words. Text goes only into text nodes, never into markup, so that a model's
// text is shown unchanged.

// h('p.quiet', { id: 'count' }, 'text'); without attributes h('p.quiet', 'text'). Children that are
// null, undefined or false are left out.
function h(selector, ...children) {
  const [tag, ...classes] = selector.split('.');
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(' ');
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => (child ?? false) !== false));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const MISSING = '–';

function number(value, digits = 3) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isInteger(value)) return value.toLocaleString('en-US');
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString('en-US');
  if (size < 0.001) return value.toExponential(2);
  return value.toFixed(digits);
}

function signed(value, digits = 3) {
  return value === null || value === undefined
    ? MISSING
    : (value > 0 ? '+' : '') + number(value, digits);
}

function interval(low, high) {
  return low === null || low === undefined ? '' : `${number(low)} to ${number(high)}`;
}

function plural(count, what) {
  return `${number(count)} ${what}${count === 1 ? '' : 's'}`;
}

// Right-aligned texts: a number, possibly with a deviation, as an interval or in a link.
const NUMERIC = /^[+-]?[\d.,]+(e[+-]?\d+)?%?(( ± | to )[+-]?[\d.,]+(e[+-]?\d+)?)?$/;

// A table. A cell is text, a number, an element, or null if it is empty. Columns that contain only
// numbers are right-aligned. The head may be one string with | between the names. With the shape
// 'cards', a narrow window shows each row as a separate block whose cells repeat the names.
function table(names, rows, caption, shape = '') {
  if (!rows.length) return quiet('None.');
  const head = typeof names === 'string' ? names.split('|') : names;
  const isNumber = (cell) => typeof cell === 'number' || NUMERIC.test(cell.textContent ?? cell);
  const kinds = head.map((_, column) => {
    const cells = rows.map((row) => row[column]).filter((cell) => (cell ?? MISSING) !== MISSING);
    return cells.length > 0 && cells.every(isNumber) && 'number';
  });
  const cell = (value, column) =>
    h(
      'td',
      { class: kinds[column], 'data-head': shape && head[column] },
      typeof value === 'number' ? number(value) : (value ?? MISSING),
    );
  const titles = head.map((name, column) => h('th', { scope: 'col', class: kinds[column] }, name));
  const hint = h('b.hint');
  const label = caption || head.join(', ');
  const body = rows.map((row) => h('tr', row.map(cell)));
  const scroller = h(
    'div',
    { class: `scroll ${shape}`, tabindex: 0, role: 'region', 'aria-label': label },
    h('table', h('caption', hint, caption), h('thead', h('tr', titles)), h('tbody', body)),
  );
  new ResizeObserver(() => {
    const { scrollWidth, clientWidth, scrollHeight, clientHeight } = scroller;
    const hidden = [
      scrollWidth > clientWidth + 1 && 'more columns →',
      scrollHeight > clientHeight + 1 && 'more rows ↓',
    ];
    hint.textContent = hidden.filter(Boolean).join(' ');
  }).observe(scroller);
  return scroller;
}

// A labeled menu of [value, text] pairs.
function select(title, attributes, options, selected) {
  const option = ([value, text]) =>
    h('option', { value, selected: String(value) === String(selected) }, text);
  return h('label', `${title} `, h('select', attributes, options.map(option)));
}

function quiet(...content) {
  return h('p.quiet', ...content);
}

function section(title, ...content) {
  return h('section', h('h2', title), ...content);
}

// A collapsible section. Its content is created when it is first opened. The key is unique in a
// view; `make` gets one that is unique on all pages.
function unfold(key, summary, make, open = false) {
  const own = keyInView(key);
  const details = h('details', h('summary', summary));
  const fill = () => {
    if (details.open && details.childElementCount === 1) details.append(make(own));
  };
  details.addEventListener('toggle', () => {
    kept.set(own, details.open);
    fill();
  });
  details.open = kept.get(own) ?? open;
  fill();
  return details;
}

// A mark next to the word, so that the outcome can be read without its color.
const MARKS = { correct: '✓', wrong: '✗', 'no answer': '∅', 'timed out': '◷', crashed: '⚠' };

function outcome(name) {
  return h('span', { class: `outcome ${name.replace(' ', '-')}` }, `${MARKS[name] || '?'} ${name}`);
}
