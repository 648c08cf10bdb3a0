// One request: its prompt as a strip, blue where the resident prefix held, red from the first difference on.

const STRIP = { height: 118, top: 34, bar: 44 };
const PATTERN_ID = 'lost-hatch'; // the style sheet fills with it

async function openMicroscope(id) {
  const dialog = byId('microscope');
  setText(byId('microscope-title'), `Request ${id}`);
  byId('microscope-body').replaceChildren(el('p', { class: 'none', text: 'Loading' }));
  hold('microscope', true); // its row must still be there when the focus goes back to it
  if (!dialog.open) dialog.showModal();
  history.replaceState(null, '', `#request=${encodeURIComponent(id)}`);
  try {
    const record = await getJson(`/prefixproxy/requests/${encodeURIComponent(id)}`);
    drawMicroscope(record);
  } catch (failure) {
    byId('microscope-body').replaceChildren(el('p', { class: 'none', text: failure.message }));
  }
}

function buildMicroscope() {
  const dialog = byId('microscope');
  byId('microscope-close').addEventListener('click', () => dialog.close());
  dialog.addEventListener('close', () => {
    hold('microscope', false);
    history.replaceState(null, '', location.pathname + location.search);
  });
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
}

function drawMicroscope(record) {
  const body = byId('microscope-body');
  const strip = svg('svg', { class: 'strip', role: 'img', 'aria-label': headline(record) });
  body.replaceChildren(
    el('p', { class: 'headline', text: headline(record) }),
    el('p', { class: 'advice', text: record.explain.advice }),
    strip,
    stripLegend(record),
    ...differenceText(record),
    factList(record),
    ...movedTable(record),
    ...segmentTable(record),
    el('details', {}, el('summary', { text: 'Everything recorded' }),
      el('pre', { tabindex: '0', text: JSON.stringify(record, null, 2) })));
  drawStrip(strip, record);
}

function headline(record) {
  const { cost } = record.explain;
  if (record.outcome !== 'ok') return `This request ended as ${words(record.outcome)} with status ${record.status}.`;
  if (!isNumber(cost.saved_tokens) || !isNumber(cost.evaluated_tokens)) return 'The server did not report how much of this prompt was cached.';
  const took = isNumber(cost.seconds) ? `, which took ${cost.seconds_are === 'estimated' ? 'about ' : ''}${seconds(cost.seconds)}` : '';
  const saved = cost.saved_seconds >= 0.05 ? ` Reuse saved about ${seconds(cost.saved_seconds)}.` : '';
  const last = record.explain.tokens_are === 'those of the last prompt' ? 'Of the last prompt, ' : '';
  return `${last}${count(cost.saved_tokens)} of ${count(record.prompt_tokens)} prompt tokens were in the slot; `
    + `${count(cost.evaluated_tokens)} ${cost.evaluated_tokens === 1 ? 'was' : 'were'} evaluated${took}.${saved}`;
}

// Everything in shares of the prompt: tokens where the server reported them, else bytes.
function stripSizes(record) {
  const { explain } = record;
  const known = isNumber(record.prompt_tokens) && record.prompt_tokens > 0 && explain.strip.every((one) => isNumber(one.tokens));
  const sizes = explain.strip.map((one) => (known ? one.tokens : one.bytes));
  return { known, sizes, all: known ? record.prompt_tokens : sizes.reduce((a, b) => a + b, 0) };
}

function drawStrip(node, record) {
  const width = Math.max(280, node.clientWidth);
  node.setAttribute('viewBox', `0 0 ${width} ${STRIP.height}`);
  const { known, sizes, all } = stripSizes(record);
  if (!all) return;
  const x = (value) => (value / all) * width;
  const cached = known && isNumber(record.cache_n);
  const parts = cached
    ? reuseParts(record, x, width)
    : [svg('rect', { class: 'unknown', x: 0, y: STRIP.top, width, height: STRIP.bar })];
  node.replaceChildren(hatchPattern(), ...parts, ...borders(record.explain.strip, sizes, x), ...rootBracket(record, sizes, x),
    ...(cached ? differenceMark(record, x, width) : []));
}

function hatchPattern() {
  const pattern = { id: PATTERN_ID, width: 8, height: 8, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' };
  return svg('defs', {}, svg('pattern', pattern,
    svg('rect', { class: 'lost-ground', width: 8, height: 8 }), svg('line', { class: 'hatch', x1: 4, x2: 4, y1: 0, y2: 8 })));
}

// Held, then what a slot could have held but did not, then what had to be evaluated in any case.
function reuseParts(record, x, width) {
  const held = x(record.cache_n);
  const reusable = Math.max(held, x(record.explain.reusable_tokens ?? record.cache_n));
  const box = (name, from, to) =>
    (to - from > 0 ? [svg('rect', { class: name, x: from, y: STRIP.top, width: to - from, height: STRIP.bar })] : []);
  return [
    ...box('held', 0, held),
    ...box('lost-edge', held, reusable),
    ...box('new', reusable, width),
    ...label(0, held, `${count(record.cache_n)} held`, 'on-held'),
    ...label(reusable, width, `${count(record.prompt_tokens - (record.explain.reusable_tokens ?? record.cache_n))} evaluated`, 'on-new'),
  ];
}

function label(from, to, text, name) {
  if (to - from < text.length * 7 + 12) return [];
  return [svg('text', { class: name, x: (from + to) / 2, y: STRIP.top + STRIP.bar / 2 + 4, 'text-anchor': 'middle', text })];
}

function borders(strip, sizes, x) {
  let at = 0;
  return strip.flatMap((one, i) => {
    const [from, to] = [x(at), x(at + sizes[i])];
    at += sizes[i];
    const cut = i ? [svg('line', { class: 'cut', x1: from, x2: from, y1: STRIP.top, y2: STRIP.top + STRIP.bar })] : [];
    const named = to - from > one.segment.length * 6.4 + 6
      ? [svg('text', { class: 'soft', x: (from + to) / 2, y: STRIP.top + STRIP.bar + 14, 'text-anchor': 'middle', text: one.segment })] : [];
    return [...cut, ...named];
  });
}

function rootBracket(record, sizes, x) {
  const root = record.explain.strip.reduce((sum, one, i) => sum + (one.part === 'root' ? sizes[i] : 0), 0);
  if (x(root) < 40) return [];
  const y = STRIP.top + STRIP.bar + 22;
  return [
    svg('path', { class: 'root-line', d: `M0.5 ${y} v5 H${x(root) - 1} v-5` }),
    svg('text', { class: 'soft', x: x(root) / 2, y: y + 15, 'text-anchor': 'middle', text: 'root' }),
  ];
}

function differenceMark(record, x, width) {
  const first = record.explain.first_difference;
  if (!first) return [];
  const at = Math.min(width - 1, Math.max(1, x(first.token)));
  const text = `first difference: ${placeOf(first)}`;
  const side = at > width / 2 ? 'end' : 'start';
  const to = side === 'end' ? Math.max(at + 4, text.length * 6.6) : Math.min(at - 4, width - text.length * 6.6);
  return [
    svg('line', { class: 'mark', x1: at, x2: at, y1: STRIP.top - 12, y2: STRIP.top + STRIP.bar + 4 }),
    svg('text', { x: Math.min(width, Math.max(0, to)), y: STRIP.top - 17, 'text-anchor': side, text }),
  ];
}

const placeOf = (first) => `${first.segment}, ${first.exact ? '' : 'from '}byte ${count(first.offset)}`;

function stripLegend(record) {
  const items = [['held', 'the resident prefix held'], ['lost', 'known before, but not in the slot'], ['new', 'evaluated']];
  const told = { 'estimated from bytes': 'segments in tokens, estimated from bytes',
    'those of the last prompt': 'segments in bytes; the token counts are those of the last prompt' }[record.explain.tokens_are];
  const estimated = told ? [el('li', { text: told })] : [];
  return el('ul', { class: 'legend', 'aria-label': 'Legend' },
    ...items.map(([name, text]) => el('li', {}, el('span', { class: `swatch ${name}` }), text)), ...estimated);
}

// The two texts side by side, where text is stored; else what would be needed to see them.
function differenceText(record) {
  const first = record.explain.first_difference;
  if (!first) return [];
  const other = first.compared_with ? ` in comparison with request ${first.compared_with}` : '';
  const title = el('h3', { text: 'First difference' });
  const place = el('p', { text: `${placeOf(first)}${other}; ${count(first.tokens_after)} tokens stand behind it.` });
  if (first.now === undefined) {
    return [title, place, el('p', { class: 'small', text: 'Set journal.store_text = true to see the text itself from the next request on.' })];
  }
  const version = (text) => el('pre', { tabindex: '0' }, first.common, el('mark', { text: text || '(ends here)' }));
  return [title, place, el('div', { class: 'difference' },
    el('p', { class: 'small', text: 'then' }), version(first.before), el('p', { class: 'small', text: 'now' }), version(first.now))];
}

function factList(record) {
  const { cost, resident } = record.explain;
  const facts = [
    ['Kind', record.kind],
    ['Why not more', words(record.miss_reason)],
    ['Lane', record.lane || UNKNOWN],
    ['Family', record.family || UNKNOWN],
    ['Slot', record.slot === null ? UNKNOWN : `${record.slot} on ${record.upstream}${record.fork ? ', root copied' : ''}`],
    ['Expected in the slot', count(record.expected_cached)],
    ['Resident prefix ended', resident ? `about ${resident.segment}, byte ${count(resident.offset)}` : UNKNOWN],
    ['Prefill', `${seconds(cost.seconds)} (${cost.seconds_are})`],
    ['Waited for a slot', milliseconds(record.queue_ms)],
    ['First token', milliseconds(record.ttft_ms)],
    ['Total', milliseconds(record.total_ms)],
    ['Outcome', `${words(record.outcome)}, ${record.status}`],
    ...compactionFacts(record.explain),
  ];
  return el('dl', { class: 'facts' }, ...facts.map(([name, value]) =>
    el('div', {}, el('dt', { text: name }), el('dd', { text: value }))));
}

// For a long conversation: tokens that going on evaluates, and compacting now.
function compactionFacts({ compaction, re_evaluated_tokens: anew }) {
  const facts = isNumber(anew) ? [['Rewritten history', `${count(anew)} tokens evaluated anew`]] : [];
  if (!compaction) return facts;
  const way = ({ next_turn: next, anew: all }) => `${count(next)} tokens next turn, ${count(all)} whenever all is evaluated anew`;
  return [...facts,
    ['Carrying on', way(compaction.carry_on)],
    ['Compacting now', `${way(compaction.compact_now)}, with a summary of ${count(compaction.summary_tokens)} (${compaction.summary_is})`],
    ['Turns left in the slot', count(compaction.turns_left)],
    ['Compact?', compaction.advice],
  ];
}

// A name with # in front heads a column of numbers.
const headings = (...names) => names.map((name) =>
  el('th', { scope: 'col', class: name.startsWith('#') ? 'num' : null, text: name.replace('#', '') }));

function movedTable(record) {
  const { moved } = record.explain;
  if (!moved.length) return [];
  const title = moved[0].done ? 'Moved behind the root' : 'Would be moved (stabilise.mode is observe)';
  return [el('h3', { text: title }), el('div', { class: 'scroll moved', tabindex: '0', 'aria-label': title }, el('table', {},
    el('thead', {}, el('tr', {}, ...headings('Rule', 'From', '#Bytes', 'What the client could do'))),
    el('tbody', {}, ...moved.map((one) => el('tr', {}, el('td', { text: one.rule }), el('td', { text: one.segments.join(', ') }),
      el('td', { class: 'num', text: count(one.bytes) }), el('td', { text: one.advice }))))))];
}

function segmentTable(record) {
  const { strip } = record.explain;
  if (!strip.length) return [];
  const rows = strip.flatMap((one) => {
    const numbers = el('tr', {}, el('td', { text: one.segment }), el('td', { text: one.part }),
      el('td', { class: 'num', text: count(one.tokens) }), el('td', {}, share(one.cached, one.tokens), count(one.cached)),
      el('td', { class: 'num', text: count(one.bytes) }));
    return one.text === undefined ? [numbers] : [numbers, el('tr', {}, el('td', { colspan: 5 }, el('pre', { class: 'text', text: one.text })))];
  });
  return [el('h3', { text: 'Segments' }), el('div', { class: 'scroll segments', tabindex: '0', 'aria-label': 'Segments' }, el('table', {},
    el('thead', {}, el('tr', {}, ...headings('Segment', 'Part', '#Tokens', 'Held', '#Bytes'))),
    el('tbody', {}, ...rows)))];
}
