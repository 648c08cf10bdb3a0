// Talks to the proxy's own endpoints, with a key if it wants one.

const KEY_NAME = 'prefixproxy-key';
const SILENT_MS = 45000; // the server says something every 15 s, so this long a silence is a dead connection

const sleep = (ms) => new Promise((done) => { setTimeout(done, ms); });

function headersWith(more) {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

let asking = null;

// One dialog, however many calls were refused at once.
function askForKey() {
  asking ??= new Promise((done) => {
    const dialog = byId('key-dialog');
    const wrong = sessionStorage.getItem(KEY_NAME) !== null;
    if (wrong) setText(byId('key-text'), 'That key was not accepted. Another one?');
    sessionStorage.removeItem(KEY_NAME);
    byId('key-input').value = '';
    byId('key-form').onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY_NAME, byId('key-input').value.trim());
      asking = null;
      dialog.close();
      done();
    };
    dialog.showModal();
  });
  // There is nothing to see without a key, so the dialog comes back however it was closed.
  byId('key-dialog').onclose = () => { if (asking) byId('key-dialog').showModal(); };
  return asking;
}

// Browsers have words of their own for a server that is not there.
async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error('The proxy does not answer. Try again when this page says "live".');
  }
}

// The response of a call that was let in; a refused one is made again with a key.
async function call(path, options = {}) {
  for (;;) {
    const response = await reach(path, { ...options, headers: headersWith(options.headers ?? {}) });
    if (response.status !== 401) return response;
    await askForKey();
  }
}

async function getJson(path) {
  const response = await call(path);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error?.message ?? `${path}: ${response.status}`);
  return value;
}

async function patchJson(path, changes) {
  const response = await call(path, {
    method: 'PATCH',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(changes),
  });
  const value = await response.json();
  if (!response.ok) throw new Error(value.error?.message ?? String(response.status));
  return value;
}

// Reads the event stream by hand, as EventSource cannot send a key. Returns when the stream ends; throws when it breaks.
async function readEvents(cursor, onOpen, onEvent) {
  const abort = new AbortController();
  let watchdog = setTimeout(() => abort.abort(), SILENT_MS);
  const options = { headers: { 'last-event-id': String(cursor) }, signal: abort.signal };
  const response = await call('/prefixproxy/events', options);
  if (!response.ok) throw new Error(`events: ${response.status}`);
  onOpen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENT_MS);
      const blocks = (rest + value).split('\n\n');
      rest = blocks.pop();
      blocks.map(parseEvent).filter((event) => event.data).forEach(onEvent);
    }
  } finally {
    clearTimeout(watchdog);
  }
}

function parseEvent(block) {
  const event = { id: '', event: 'message', data: '' };
  for (const line of block.split('\n')) {
    const colon = line.indexOf(': ');
    if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
  }
  return event;
}
