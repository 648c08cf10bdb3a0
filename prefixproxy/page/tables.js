// The list of requests with its filters, the families, the suggested rules, the upstreams.

const ROWS = 60; // more would be painted again with every new row, for nobody to read
const list = { reasons: new Set(), frozen: null, rows: new Map(), families: '' };

function option(value, label) {
  return el('option', { value, text: label });
}

function buildFilters() {
  byId('filter-kind').replaceChildren(option('', 'all'), ...KINDS.map((kind) => option(kind, words(kind))));
  byId('filter-reason').replaceChildren(option('', 'all'), option('any', 'any miss'),
    ...MISS_REASONS.map((reason) => option(reason, words(reason))));
  byId('filter-family').replaceChildren(option('', 'all'));
}

// Families come and go; the one that is picked stays, also when it is gone.
function refreshFamilyFilter(names) {
  const select = byId('filter-family');
  const picked = select.value;
  const all = picked && !names.includes(picked) ? [...names, picked] : names;
  const key = all.join(' ');
  if (key === list.families || document.activeElement === select) return;
  list.families = key;
  select.replaceChildren(option('', 'all'), ...all.map((name) => option(name, name)));
  select.value = picked;
}

function matcher() {
  const [kind, reason, family] = ['kind', 'reason', 'family'].map((name) => byId(`filter-${name}`).value);
  const text = byId('filter-text').value.trim().toLowerCase();
  return (record) =>
    (!kind || record.kind === kind)
    && (!reason || (reason === 'any' ? record.miss_reason !== 'none' : record.miss_reason === reason))
    && (!family || record.family === family)
    && (!text || record.id.includes(text) || record.lane.toLowerCase().includes(text));
}

function drawList() {
  const source = list.frozen ?? [...store.records.values()];
  const matching = source.filter(matcher());
  const visible = matching.slice(-ROWS).reverse();
  placeRows(visible);
  show(byId('rows-empty'), visible.length === 0);
  setText(byId('rows-empty'), source.length ? 'No request matches these filters.' : 'No requests yet.');
  const shown = matching.length > visible.length ? `newest ${visible.length} of ${count(matching.length)}` : count(matching.length);
  const held = list.frozen ? `; held still${list.reasons.has('pause') ? '' : ' while you are at it'}` : '';
  setText(byId('list-caption'), `${shown} shown${held}`);
}

// Rows stay the same elements while they are shown, so focus and selection stay where they are.
function placeRows(records) {
  const body = byId('rows');
  const wanted = new Set(records.map((record) => record.id));
  for (const [id, row] of list.rows) {
    if (wanted.has(id)) continue;
    row.remove();
    list.rows.delete(id);
  }
  let next = body.firstChild;
  for (const record of records) {
    let row = list.rows.get(record.id);
    if (!row) {
      row = rowOf(record);
      list.rows.set(record.id, row);
    }
    if (row === next) next = next.nextSibling;
    else body.insertBefore(row, next);
  }
}

function rowOf(record) {
  const open = () => openMicroscope(record.id);
  const id = el('button', { type: 'button', class: 'linklike', text: record.id.slice(0, 8), 'aria-label': `Explain request ${record.id}`, onclick: open });
  const bad = record.outcome !== 'ok' ? words(record.outcome) : record.miss_reason === 'none' ? '' : words(record.miss_reason);
  return el('tr', {},
    el('td', {}, id),
    el('td', { class: 'wide', text: timeOfDay(record.time) }),
    el('td', { title: spikeOf(record), class: spikeOf(record) ? 'spike' : null, text: record.kind }),
    el('td', { class: 'wide' }, ...familyName(record.family)),
    el('td', { class: 'wide clip', text: record.lane, title: record.lane }),
    el('td', { class: 'wide num', text: record.slot ?? UNKNOWN }),
    el('td', { class: 'wide num', text: count(record.prompt_tokens) }),
    el('td', {}, share(record.cache_n, record.prompt_tokens), percent(record.cache_n, record.prompt_tokens)),
    el('td', { class: 'wide num', text: milliseconds(record.queue_ms) }),
    el('td', { class: 'wide num', text: milliseconds(record.ttft_ms) }),
    el('td', { class: 'wide num', text: milliseconds(record.total_ms) }),
    el('td', { class: 'miss clip', text: bad, title: bad }));
}

// A history that was rewritten is evaluated anew, once: the price of a compaction.
function spikeOf(record) {
  if (!['compaction', 'rewrite', 'reducer'].includes(record.kind) || !isNumber(record.prompt_n)) return '';
  return `${count(record.prompt_n)} tokens evaluated, as this prompt was put together anew`;
}

function familyName(name) {
  if (!name) return [UNKNOWN];
  const dot = el('span', { class: 'dot' });
  dot.style.background = familyColour(name);
  return [dot, name.slice(0, 8)];
}

function share(part, all) {
  const known = isNumber(part) && isNumber(all) && all > 0;
  const inner = el('i');
  inner.style.width = known ? `${Math.min(100, (100 * part) / all)}%` : '0';
  if (!known) inner.style.border = '0';
  return el('span', { class: known ? 'share' : 'share unknown', 'aria-hidden': 'true' }, inner);
}

// Rows that move away under the pointer, or from the focus, cannot be picked: the list holds still meanwhile.
function hold(reason, on) {
  if (on) list.reasons.add(reason);
  else list.reasons.delete(reason);
  if (list.reasons.size && !list.frozen) list.frozen = [...store.records.values()];
  if (!list.reasons.size) list.frozen = null;
  drawList();
}

function refreshHeld() {
  if (!list.frozen) return;
  list.frozen = [...store.records.values()];
  drawList();
}

function togglePause() {
  const on = !list.reasons.has('pause');
  byId('pause').setAttribute('aria-pressed', String(on));
  hold('pause', on);
}

function buildList() {
  const box = byId('list');
  byId('pause').addEventListener('click', togglePause);
  box.addEventListener('mouseenter', () => hold('pointer', true));
  box.addEventListener('mouseleave', () => hold('pointer', false));
  box.addEventListener('focusin', () => hold('focus', true));
  box.addEventListener('focusout', () => hold('focus', false));
}

const drawFamilies = drawer(byId('families'), (families) => families.map(familyRow));

function familyRow(family) {
  const tokens = family.cached_tokens + family.evaluated_tokens;
  const pick = () => {
    refreshFamilyFilter([family.family]);
    byId('filter-family').value = family.family;
    drawList();
    byId('requests').scrollIntoView();
  };
  const dot = familyName(family.family)[0];
  const name = el('button', { type: 'button', class: 'linklike', text: family.family.slice(0, 8), onclick: pick, 'aria-label': `Show requests of family ${family.family}` });
  const reason = family.top_miss_reason;
  return el('tr', {},
    el('td', {}, dot, name),
    el('td', { class: 'num', text: count(family.requests) }),
    el('td', {}, share(family.cached_tokens, tokens), percent(family.cached_tokens, tokens)),
    el('td', { class: 'wide num', text: short(tokens) }),
    el('td', { class: reason === 'none' ? '' : 'miss', text: words(reason) }));
}

const drawSuggestions = drawer(byId('suggestions'), (suggestions) => suggestions.map((one) => {
  const copy = el('button', { type: 'button', text: 'Copy', 'aria-label': `Copy rule ${one.name}` });
  copy.addEventListener('click', () => copyText(one.toml, copy));
  const where = `${one.segment}, line ${one.line}: ${plural(one.values, 'value', 'values')} seen. Paste into a file named in stabilise.rules.`;
  return el('li', {}, el('p', {}, el('span', { text: where }), copy), el('pre', { text: one.toml, tabindex: '0' }));
}));

const drawUpstreams = drawer(byId('upstreams'), (upstreams) => upstreams.map((upstream) => {
  const facts = [upstream.model, upstream.slots && plural(upstream.slots, 'slot', 'slots'),
    upstream.context && `${count(upstream.context)} tokens each`].filter(Boolean).join(', ');
  const state = upstream.up ? facts : upstream.failure || upstream.health;
  return el('li', { class: upstream.up ? '' : 'down' }, el('b', { text: upstream.name }), ` ${upstream.up ? '' : 'down: '}${state}`);
}));

function drawStatus() {
  const { status } = store;
  if (!status) return;
  setText(byId('version'), status.version);
  drawUpstreams(status.upstreams.map((u) => ({ name: u.name, up: u.up, failure: u.failure, health: u.health,
    model: (u.model ?? '').split('/').at(-1), slots: u.slots.length, context: u.n_ctx_slot })));
  const families = [...status.families].sort((a, b) =>
    b.cached_tokens + b.evaluated_tokens - a.cached_tokens - a.evaluated_tokens).slice(0, 50);
  drawFamilies(families);
  show(byId('families-empty'), families.length === 0);
  refreshFamilyFilter(families.map((family) => family.family));
  drawSuggestions((status.suggestions ?? []).map(({ seconds_ago: _, ...one }) => one));
  show(byId('suggestions-empty'), !(status.suggestions ?? []).length);
}
