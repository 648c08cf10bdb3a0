// Picking a request in the timeline, with the pointer or with keys, and saying what it is.

// What stands under the pointer; the last one drawn lies on top, a request before a copy that leads to it.
function drawnAt(event) {
  const box = byId('timeline').getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const there = timeline.drawn.filter((d) => x >= d.left - 2 && x <= d.right + 2 && y >= d.top && y <= d.bottom);
  return there.find((one) => one.bar) ?? there[0];
}

const barAt = (event) => drawnAt(event)?.bar;

function readOut(event) {
  const found = drawnAt(event);
  byId('timeline').style.cursor = found?.bar ? 'pointer' : '';
  setText(byId('readout'), found ? readOutOf(found) : '');
}

const readOutOf = ({ bar, copy }) => (bar ? summary(bar.record) : copySummary(copy));

function copySummary(copy) {
  const from = isNumber(copy.source) ? `slot ${copy.source}` : 'its saved file';
  return `root copied from ${from} to slot ${copy.slot} in ${seconds(copy.seconds)}`;
}

function summary(record) {
  const reused = `${count(record.cache_n)} of ${count(record.prompt_tokens)} tokens reused`;
  const times = `waited ${milliseconds(record.queue_ms)}, first token ${milliseconds(record.ttft_ms)}, total ${milliseconds(record.total_ms)}`;
  const reason = record.miss_reason === 'none' ? '' : `; ${words(record.miss_reason)}`;
  return `${record.kind} ${record.id.slice(0, 8)}: ${reused}; ${times}${record.fork ? '; root copied' : ''}${reason}`;
}

// Bars and copies from the oldest to the newest, each once: a request that waited is drawn twice.
function drawnInOrder() {
  const byName = new Map(timeline.drawn.map((one) => [nameOf(one), one]));
  return [...byName.values()].sort((a, b) => a.right - b.right);
}

function pick(one) {
  timeline.picked = one ? nameOf(one) : null;
  setText(byId('readout'), one ? readOutOf(one) : '');
}

function pickByKey(event) {
  const all = drawnInOrder();
  const at = all.findIndex((one) => nameOf(one) === timeline.picked);
  const last = all.length - 1;
  const to = { ArrowLeft: at < 0 ? last : Math.max(0, at - 1), ArrowRight: at < 0 ? last : Math.min(last, at + 1), Home: 0, End: last }[event.key];
  if (to !== undefined && all.length) pick(all[to]);
  else if (event.key === 'Enter' && all[at]?.bar) openMicroscope(all[at].bar.record.id);
  else return;
  event.preventDefault();
}

function buildTimeline() {
  const canvas = byId('timeline');
  canvas.addEventListener('mousemove', readOut);
  canvas.addEventListener('mouseleave', () => setText(byId('readout'), ''));
  canvas.addEventListener('click', (event) => {
    const bar = barAt(event);
    if (bar) openMicroscope(bar.record.id);
  });
  canvas.addEventListener('keydown', pickByKey);
  canvas.addEventListener('blur', () => pick(null));
}
