// What the page knows. Everything in here is bounded, however long it stays open.

const KINDS = ['root', 'fork', 'continuation', 'rewrite', 'compaction', 'reducer', 'side', 'unique'];
const MISS_REASONS = ['none', 'cold_root', 'root_changed', 'tools_changed', 'history_changed', 'slot_evicted',
  'fork_failed', 'no_rollback', 'upstream_restarted', 'reuse_off', 'unknown'];

const MAX_RECORDS = 1000;
const MAX_BARS = 6000;

const store = {
  start: null, // of the proxy's process, to notice a restart
  knownSince: 0, // of requests that ended before, some were never told or are forgotten
  cursor: 0, // number of the last event seen
  arrived: [], // records that came since the last frame
  records: new Map(), // by id, oldest first
  bars: [], // what the timeline draws of a record, in order of their end
  running: new Map(), // ticket to when it was first seen in a slot
  status: null,
  steps: new Map(), // by time
  total: null,
  warmups: [],
  copies: new Map(), // of roots into slots, by when and where
  stepSeconds: 10,
  clockAhead: 0, // the server's clock less ours, in seconds
};

const serverNow = () => Date.now() / 1000 + store.clockAhead;

function reset(start) {
  Object.assign(store, { start, knownSince: 0, cursor: 0, arrived: [], bars: [], total: null, warmups: [] });
  for (const map of [store.records, store.running, store.steps, store.copies]) map.clear();
}

function trim(map, limit) {
  for (const key of map.keys()) {
    if (map.size <= limit) return;
    map.delete(key);
  }
}

// Takes over what arrived; returns whether there was anything. A tab in the background gets no frames, hence the bound.
function absorb() {
  if (!store.arrived.length) return false;
  for (const record of store.arrived) {
    if (store.records.has(record.id)) continue;
    store.records.set(record.id, record);
    store.bars.push(barOf(record));
    store.running.delete(record.id);
  }
  store.arrived.length = 0;
  trim(store.records, MAX_RECORDS);
  if (store.bars.length > MAX_BARS * 1.2) {
    store.bars.splice(0, store.bars.length - MAX_BARS);
    store.knownSince = store.bars[0].end;
  }
  return true;
}

function arrive(record) {
  store.arrived.push(record);
  if (store.arrived.length > MAX_BARS) store.knownSince = barOf(store.arrived.splice(0, MAX_RECORDS).at(-1)).end;
}

// Times in Unix seconds: arrived, sent to a slot, prefill begun, first token, end.
function barOf(record) {
  const arrived = record.time;
  const sent = arrived + record.queue_ms / 1000;
  const end = arrived + record.total_ms / 1000;
  const first = isNumber(record.ttft_ms) ? arrived + record.ttft_ms / 1000 : end;
  const prefill = isNumber(record.prompt_ms) ? Math.max(sent, first - record.prompt_ms / 1000) : sent;
  const lane = record.slot === null ? null : `${record.upstream}/${record.slot}`;
  return { record, lane, arrived, sent, prefill, first, end, colour: record.family };
}

function takeTrend(trend) {
  Object.assign(store, { total: trend.total, warmups: trend.warmups, stepSeconds: trend.step_s });
  for (const step of trend.steps) store.steps.set(step.time, step);
  trim(store.steps, 400);
  for (const copy of trend.copies) store.copies.set(`${copy.end} ${copy.upstream} ${copy.slot}`, copy);
  trim(store.copies, 512);
}

function takeStatus(status) {
  store.status = status;
  store.clockAhead = status.time - Date.now() / 1000;
  const seen = new Set();
  for (const slot of slotsOf(status)) {
    if (slot.state !== 'leased' || !slot.ticket) continue;
    seen.add(slot.ticket);
    if (!store.running.has(slot.ticket)) store.running.set(slot.ticket, serverNow());
  }
  for (const ticket of store.running.keys()) if (!seen.has(ticket)) store.running.delete(ticket);
}

const slotsOf = (status) =>
  (status?.upstreams ?? []).flatMap((upstream) => upstream.slots.map((slot) => ({ ...slot, upstream: upstream.name })));

// The newest step that counts as "now" is a minute's worth of them.
function lastMinute() {
  const from = serverNow() - 60 - store.stepSeconds;
  const sum = { requests: 0, cached: 0, evaluated: 0, misses: 0, saved_s: 0 };
  for (const step of store.steps.values()) {
    if (step.time >= from) for (const name of Object.keys(sum)) sum[name] += step[name];
  }
  return sum;
}
