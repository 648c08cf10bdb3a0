// Starts everything: loads what there is, follows the event stream, and draws at most once per frame.

const POLL_MS = 1000;
const SLOWEST_RETRY_MS = 5000;
const SLOWEST_DRAWING_MS = 400;
const EVERY_MS = { timeline: 60, list: 400, charts: 1000 };
if (matchMedia('(prefers-reduced-motion: reduce)').matches) EVERY_MS.timeline = 1000;

const due = { timeline: 0, list: 0, charts: 0 };
let listChanged = true;

function connection(state, text) {
  const node = byId('connection');
  if (node.dataset.state !== state) node.dataset.state = state;
  setText(node, text);
}

// However many records arrive, the document is touched once per frame, and the tables a few times a second.
function frame(now) {
  requestAnimationFrame(frame); // first, so that a mistake in one drawing does not end all of them
  listChanged = absorb() || listChanged;
  if (now >= due.timeline) {
    const began = performance.now();
    drawTimeline();
    // Thousands of bars take their time: about a tenth of it all is theirs, so that the rest answers at once.
    const cost = Math.min(SLOWEST_DRAWING_MS, 10 * (performance.now() - began));
    due.timeline = now + Math.max(EVERY_MS.timeline, Math.min(SLOWEST_DRAWING_MS, timeline.pixelMs), cost);
  }
  if (listChanged && !list.frozen && now >= due.list) {
    due.list = now + EVERY_MS.list;
    listChanged = false;
    drawList();
  }
  if (now >= due.charts) {
    due.charts = now + EVERY_MS.charts;
    drawTiles();
    drawCharts();
    drawStatus();
    show(byId('empty'), store.total !== null && store.total.requests === 0 && store.records.size === 0);
  }
}

// Everything the proxy still remembers, and the number of the event to go on from.
async function reload() {
  const trend = await getJson('/prefixproxy/trend');
  reset(trend.start);
  takeTrend(trend);
  const { requests, last } = await getJson(`/prefixproxy/requests?limit=${MAX_RECORDS}`);
  requests.reverse().forEach(arrive);
  store.cursor = last;
  absorb();
  if (last > requests.length && store.bars.length) store.knownSince = store.bars[0].end;
  refreshHeld(); // a list that is held still would go on showing a former process
  listChanged = true;
}

function takeEvent(event) {
  if (event.event === 'record') arrive(JSON.parse(event.data));
  if (event.event === 'missed') store.knownSince = serverNow();
  if (event.id) store.cursor = Number(event.id);
}

// A proxy that was restarted counts from one again: then all is loaded anew.
async function restarted() {
  return (await getJson(`/prefixproxy/trend?since=${Number.MAX_SAFE_INTEGER}`)).start !== store.start;
}

async function follow() {
  let pause = 250;
  for (;;) {
    try {
      if (store.start === null || await restarted()) await reload();
      await readEvents(store.cursor, () => { pause = 250; connection('live', 'live'); }, takeEvent);
    } catch {
      pause = Math.min(SLOWEST_RETRY_MS, pause * 2);
    }
    connection('lost', 'reconnecting');
    await sleep(pause);
  }
}

async function poll() {
  for (;;) {
    await sleep(POLL_MS);
    if (document.hidden || store.start === null) continue;
    try {
      const newest = Math.max(0, ...store.steps.keys());
      const [status, trend] = await Promise.all([getJson('/prefixproxy/status'), getJson(`/prefixproxy/trend?since=${newest}`)]);
      if (trend.start === store.start) {
        takeStatus(status);
        takeTrend(trend);
      }
    } catch {
      continue; // the event stream notices as well, and says so
    }
  }
}

function emptyCommand() {
  const body = JSON.stringify({ messages: [{ role: 'user', content: 'Name three colours.' }], max_tokens: 16 });
  const key = sessionStorage.getItem(KEY_NAME) ? " -H 'authorization: Bearer YOUR_KEY'" : '';
  return `curl ${location.origin}/v1/chat/completions${key} -H 'content-type: application/json' \\\n  -d '${body}'`;
}

function build() {
  buildSpans();
  buildFilters();
  buildList();
  buildMicroscope();
  const empty = byId('empty-copy');
  setText(byId('empty-command'), emptyCommand());
  empty.addEventListener('click', () => copyText(emptyCommand(), empty));
  byId('filters').addEventListener('input', drawList);
  byId('filters').addEventListener('reset', () => setTimeout(drawList)); // the fields are empty only after the event
  byId('filters').addEventListener('submit', (event) => event.preventDefault());
  byId('admission').addEventListener('submit', applyAdmission);
  byId('admission').addEventListener('reset', undoAdmission);
  buildTimeline();
  isDark.addEventListener('change', () => {
    readPalette();
    list.rows.forEach((row) => row.remove());
    list.rows.clear();
    listChanged = true;
  });
}

async function start() {
  build();
  requestAnimationFrame(frame);
  try {
    takeStatus(await getJson('/prefixproxy/status'));
    await loadAdmission();
  } catch (failure) {
    tellAdmission('error', failure.message);
  }
  follow();
  poll();
  const wanted = new URLSearchParams(location.hash.slice(1)).get('request');
  if (wanted) openMicroscope(wanted);
}

start();
