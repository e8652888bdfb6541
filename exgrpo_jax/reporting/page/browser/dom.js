// Elements, numbers and words. Text goes into text nodes alone, never into markup: what a model
// wrote is shown as it is.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
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

// A table with its head. A cell is text, a number (set right), an element, or null where there is none.
// As 'cards' each row is a block of its own in a narrow window, with the head's words in its cells.
function table(head, rows, caption, shape = '') {
  const isNumber = (cell) => typeof cell === 'number';
  const kinds = head.map((_, column) =>
    rows.some((row) => isNumber(row[column])) ? 'number' : null,
  );
  const cells = (row) =>
    row.map((cell, column) =>
      h(
        'td',
        {
          class: isNumber(cell) || cell === null ? kinds[column] : null,
          'data-head': shape && head[column],
        },
        isNumber(cell) ? number(cell) : (cell ?? MISSING),
      ),
    );
  return h(
    'div',
    {
      class: `scroll ${shape}`,
      tabindex: 0,
      role: 'region',
      'aria-label': caption || head.join(', '),
    },
    h(
      'table',
      null,
      caption ? h('caption', null, caption) : null,
      h(
        'thead',
        null,
        h(
          'tr',
          null,
          head.map((name, column) => h('th', { scope: 'col', class: kinds[column] }, name)),
        ),
      ),
      h(
        'tbody',
        null,
        rows.map((row) => h('tr', null, cells(row))),
      ),
    ),
  );
}

function section(title, ...content) {
  return h('section', null, h('h2', null, title), ...content);
}

// What is in it is made when it is first opened.
function unfold(summary, make, open = false) {
  const details = h('details', null, h('summary', null, summary));
  const fill = () => {
    if (details.childElementCount === 1) details.append(make());
  };
  details.addEventListener('toggle', () => {
    if (details.open) fill();
  });
  if (open) {
    details.open = true;
    fill();
  }
  return details;
}

// A mark beside the word, so that no outcome is told by its colour alone.
const MARKS = { correct: '✓', wrong: '✗', 'no answer': '∅', 'timed out': '◷', crashed: '⚠' };

function outcome(name) {
  return h('span', { class: `outcome ${name.replace(' ', '-')}` }, `${MARKS[name] || '?'} ${name}`);
}
