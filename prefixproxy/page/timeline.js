// One lane for each slot, on a canvas: thousands of bars move at once, which would be too much for elements.
// Prefill has the whole height of a lane and decode the lower half, so they differ in shape as well as in shade.

const LANE = { gutter: 72, axis: 20, lowest: 18, highest: 36 };
const WAITS = { height: 8, fewest: 4 };
const STAGE = 240; // as in the style sheet: a few lanes are drawn high, many are scrolled
const LABEL_WIDTH = 78;
const SHORTEST_WAIT = 0.03; // seconds; less would be a hair on the screen
const SPANS = { '30 s': 30, '1 min': 60, '5 min': 300 };

const timeline = { span: 60, pixelMs: 0, drawn: [], lanes: [], palette: null, picked: null };

function buildSpans() {
  const buttons = Object.entries(SPANS).map(([label, span]) => {
    const pick = () => {
      timeline.span = span;
      for (const each of byId('spans').children) each.setAttribute('aria-pressed', String(each === button));
    };
    const button = el('button', { type: 'button', text: label, 'aria-pressed': String(span === timeline.span), onclick: pick });
    return button;
  });
  byId('spans').replaceChildren(...buttons);
}

// Slots that the upstreams have, and a lane for requests whose slot the server chose unseen.
function lanesNow() {
  const slots = slotsOf(store.status);
  const several = new Set(slots.map((slot) => slot.upstream)).size > 1;
  const lanes = slots.map((slot) => ({
    key: `${slot.upstream}/${slot.id}`,
    label: several ? `${slot.upstream} ${slot.id}` : `slot ${slot.id}`,
    slot,
  }));
  if (store.bars.some((bar) => bar.lane === null && bar.record.upstream)) lanes.push({ key: null, label: 'unpinned', slot: null });
  return lanes;
}

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  timeline.palette = { line: read('--line'), soft: read('--soft'), ink: read('--ink'), panel: read('--panel') };
}

// Makes the canvas as large as it is shown, in the device's own pixels.
function fitCanvas(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

// Lanes share the stage with the queue below them, which takes what they leave.
function sizesFor(lanes) {
  const spare = STAGE - LANE.axis - WAITS.fewest * WAITS.height - 10;
  const lane = Math.min(LANE.highest, Math.max(LANE.lowest, Math.floor(spare / Math.max(1, lanes))));
  const waitsAt = lanes * lane + 6;
  const waitRows = Math.max(WAITS.fewest, Math.floor((STAGE - LANE.axis - 4 - waitsAt) / WAITS.height));
  return { lane, bar: Math.round(lane * 0.7), waitsAt, waitRows, height: waitsAt + waitRows * WAITS.height + LANE.axis + 2 };
}

function drawTimeline() {
  const canvas = byId('timeline');
  if (!timeline.palette) readPalette();
  const lanes = lanesNow();
  const size = sizesFor(lanes.length);
  const [context, width] = fitCanvas(canvas, size.height);
  const now = serverNow();
  const view = { context, width, lanes, now, from: now - timeline.span, ...size };
  timeline.pixelMs = (1000 * timeline.span) / Math.max(1, width - LANE.gutter); // sooner there is nothing to see
  view.x = (time) => LANE.gutter + ((time - view.from) / timeline.span) * (width - LANE.gutter);
  context.font = '11px system-ui, sans-serif';
  drawGrid(view);
  timeline.drawn = [];
  context.save();
  context.beginPath();
  context.rect(LANE.gutter, 0, width - LANE.gutter, size.height);
  context.clip();
  drawUnknown(view);
  drawWarmups(view);
  const shown = drawBarsOfRequests(view);
  drawOccupied(view);
  drawCopies(view);
  drawPicked(view);
  context.restore();
  describeTimeline(shown, now);
}

// Where requests were that this page does not have, empty lanes would look idle.
function drawUnknown({ context, x, from, height }) {
  const width = x(store.knownSince) - LANE.gutter;
  if (store.knownSince <= from || width < 1) return;
  context.fillStyle = timeline.palette.line;
  context.globalAlpha = 0.5;
  context.fillRect(LANE.gutter, 0, width, height - LANE.axis);
  context.globalAlpha = 1;
  context.fillStyle = timeline.palette.soft;
  context.textAlign = 'left';
  if (width > 150) context.fillText('older requests are not kept', LANE.gutter + 8, 12);
}

function drawGrid({ context, width, lanes, lane: high, from, now, waitsAt, waitRows, height, x }) {
  const { line, soft } = timeline.palette;
  context.fillStyle = soft;
  context.strokeStyle = line;
  context.textBaseline = 'middle';
  context.textAlign = 'left';
  lanes.forEach((lane, i) => {
    const y = Math.round(i * high + high / 2) + 0.5;
    context.fillText(clip(lane.label, 12), 0, y);
    stroke(context, LANE.gutter, y, width, y);
  });
  context.fillText('queue', 0, waitsAt + (waitRows * WAITS.height) / 2);
  const room = Math.max(1, Math.floor((width - LANE.gutter) / LABEL_WIDTH));
  const step = timeline.span / [1, 2, 3, 6].findLast((parts) => parts <= Math.max(1, room));
  context.textAlign = 'center';
  for (let time = Math.ceil(from / step) * step; time <= now; time += step) {
    const at = Math.round(x(time)) + 0.5;
    stroke(context, at, 0, at, height - LANE.axis);
    if (at > LANE.gutter + 22 && at < width - 24) context.fillText(timeOfDay(time), at, height - LANE.axis / 2);
  }
}

function stroke(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

const clip = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

// Newest first, as they end in order: the first one that ended before the view ends the search.
function drawBarsOfRequests(view) {
  const rowOf = new Map(view.lanes.map((lane, i) => [lane.key, i]));
  const waits = [];
  let shown = 0;
  for (let i = store.bars.length - 1; i >= 0; i -= 1) {
    const bar = store.bars[i];
    if (bar.end < view.from - 1) break;
    shown += 1;
    if (bar.record.upstream && rowOf.has(bar.lane)) drawBar(view, bar, rowOf.get(bar.lane));
    if (bar.sent - bar.arrived > SHORTEST_WAIT) waits.push(bar);
  }
  drawWaits(view, waits);
  return shown;
}

const barTop = (view, row) => Math.round(row * view.lane + (view.lane - view.bar) / 2);

function drawBar(view, bar, row) {
  const { context, x, bar: high } = view;
  const top = barTop(view, row);
  const [sent, prefill, first, end] = [x(bar.sent), x(bar.prefill), x(bar.first), x(bar.end)];
  context.fillStyle = familyColour(bar.colour);
  context.fillRect(prefill, top, Math.max(1, first - prefill), high);
  context.globalAlpha = 0.55;
  if (end > first) context.fillRect(first, top + high / 2, Math.max(0.5, end - first), high / 2);
  if (prefill - sent > 1) context.fillRect(sent, top + high / 2 - 1, prefill - sent, 2);
  context.globalAlpha = 1;
  if (bar.record.outcome !== 'ok') drawCross(context, end, top + high / 2);
  timeline.drawn.push({ bar, left: sent, right: Math.max(end, sent + 3), top, bottom: top + high });
}

// A root that was copied: an arrow from the slot that held it, or, with a dot at its start, from the file it is saved in.
function drawCopies(view) {
  const { context, x, bar: high, lane } = view;
  for (const copy of store.copies.values()) {
    const at = view.lanes.findIndex((one) => one.key === `${copy.upstream}/${copy.slot}`);
    if (at < 0 || copy.end < view.from || copy.outcome !== 'ok') continue;
    const source = view.lanes.findIndex((one) => one.key === `${copy.upstream}/${copy.source}`);
    const right = x(copy.end);
    const left = Math.min(x(copy.end - copy.seconds), right - 7);
    const [from, to] = [source < 0 ? barTop(view, at) - 3 : source * lane + lane / 2, at * lane + lane / 2];
    context.strokeStyle = timeline.palette.ink;
    context.fillStyle = timeline.palette.ink;
    if (source < 0) dot(context, left, from);
    arrow(context, left, from, right, to);
    timeline.drawn.push({ copy, left: left - 4, right: right + 4, top: barTop(view, at), bottom: barTop(view, at) + high });
  }
}

function dot(context, x, y) {
  context.beginPath();
  context.arc(x, y, 2.5, 0, 2 * Math.PI);
  context.fill();
}

const HEAD = { length: 7, half: 3.2 };

// The paper's colour around it keeps it readable on bars of any colour.
function arrow(context, x1, y1, x2, y2) {
  const angle = Math.atan2(y2 - y1, x2 - x1);
  const [dx, dy] = [Math.cos(angle), Math.sin(angle)];
  const [neckX, neckY] = [x2 - dx * HEAD.length, y2 - dy * HEAD.length];
  const ink = context.strokeStyle;
  context.lineWidth = 4;
  context.strokeStyle = timeline.palette.panel;
  stroke(context, x1, y1, neckX, neckY);
  context.lineWidth = 1.5;
  context.strokeStyle = ink;
  stroke(context, x1, y1, neckX, neckY);
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x2, y2);
  context.lineTo(neckX - dy * HEAD.half, neckY + dx * HEAD.half);
  context.lineTo(neckX + dy * HEAD.half, neckY - dx * HEAD.half);
  context.fill();
}

function drawCross(context, x, y) {
  context.strokeStyle = timeline.palette.ink;
  stroke(context, x - 4, y - 4, x + 4, y + 4);
  stroke(context, x - 4, y + 4, x + 4, y - 4);
}

// Each wait in the first row that is free; what does not fit into the rows is drawn over in the last one.
function drawWaits({ context, x, waitsAt, waitRows }, bars) {
  const ends = [];
  bars.sort((a, b) => a.arrived - b.arrived);
  for (const bar of bars) {
    let row = ends.findIndex((end) => end <= bar.arrived);
    if (row < 0) row = Math.min(ends.length, waitRows - 1);
    ends[row] = bar.sent;
    const top = waitsAt + row * WAITS.height;
    context.fillStyle = familyColour(bar.colour);
    context.fillRect(x(bar.arrived), top + 2, Math.max(1, x(bar.sent) - x(bar.arrived)), WAITS.height - 4);
    timeline.drawn.push({ bar, left: x(bar.arrived), right: x(bar.sent) + 2, top, bottom: top + WAITS.height });
  }
}

function drawWarmups(view) {
  for (const warmup of store.warmups) {
    const row = view.lanes.findIndex((lane) => lane.key === `${warmup.upstream}/${warmup.slot}`);
    if (row < 0 || warmup.end < view.from) continue;
    hatch(view, view.x(warmup.end - (warmup.seconds ?? 0)), view.x(warmup.end), row, warmup.outcome === 'ok' ? '' : 'failed');
  }
}

function hatch(view, left, right, row, label) {
  const { context, bar: high } = view;
  const top = barTop(view, row) + 0.5;
  const width = Math.max(3, right - left);
  context.strokeStyle = timeline.palette.soft;
  context.save();
  context.beginPath();
  context.rect(left, top, width, high - 1);
  context.stroke();
  context.clip();
  for (let x = left - high; x < left + width; x += 5) stroke(context, x, top + high, x + high, top);
  context.restore();
  if (label) context.fillText(label, left + 4, top + high / 2);
}

// What runs right now has no record yet: the status says which slot it is in, and we remember since when we know.
function drawOccupied(view) {
  const { context, x, now } = view;
  view.lanes.forEach((lane, row) => {
    const { slot } = lane;
    if (!slot || slot.state === 'idle') return;
    if (slot.state !== 'leased') return hatch(view, x(now) - 14, x(now), row, '');
    const since = store.running.get(slot.ticket);
    if (since === undefined) return;
    const top = barTop(view, row) + 0.5;
    context.strokeStyle = familyColour(slot.family);
    context.setLineDash([4, 3]);
    context.strokeRect(x(since), top, Math.max(2, x(now) - x(since)), view.bar - 1);
    context.setLineDash([]);
  });
}

const nameOf = ({ bar, copy }) => (bar ? bar.record.id : `${copy.end} ${copy.upstream} ${copy.slot}`);

function drawPicked({ context }) {
  if (timeline.picked === null) return;
  context.strokeStyle = timeline.palette.ink;
  context.lineWidth = 2;
  for (const one of timeline.drawn) {
    if (nameOf(one) !== timeline.picked) continue;
    context.strokeRect(one.left - 1, one.top - 1, Math.max(4, one.right - one.left + 2), one.bottom - one.top + 2);
  }
  context.lineWidth = 1;
}

let describedAt = 0;
const KEYS = 'The arrow keys go from request to request, Enter explains one.';

function describeTimeline(shown, now) {
  if (now - describedAt < 0.5) return;
  describedAt = now;
  const waiting = store.status?.queue.waiting ?? [];
  const reasons = {};
  for (const one of waiting) reasons[one.hold] = (reasons[one.hold] ?? 0) + 1;
  const held = Object.entries(reasons).map(([hold, n]) => `${n} ${words(hold)}`).join(', ');
  const copied = [...store.copies.values()].filter((copy) => copy.outcome === 'ok' && copy.end >= now - timeline.span).length;
  const cut = store.knownSince > now - timeline.span ? ' (older ones are not kept)' : '';
  const text = `${plural(shown, 'request', 'requests')} in view${cut}, ${count(store.status?.running ?? 0)} running, `
    + `${count(waiting.length)} waiting${held ? ` (${held})` : ''}, ${plural(copied, 'root', 'roots')} copied`;
  setText(byId('timeline-caption'), text);
  byId('timeline').setAttribute('aria-label', `Timeline of the slots: ${text}. ${KEYS}`);
}
