// Building blocks for the document. Text only ever goes in as text: nothing here reads markup.

const byId = (id) => document.getElementById(id);

// Attributes by name; `class`, `text` and `on...` handlers as one would guess.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'text') node.textContent = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children);
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

// Touching a node costs layout, so it is only done for what differs.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

// A list redrawn only when what it shows has changed.
function drawer(node, draw) {
  let drawn = null;
  return (value) => {
    const key = JSON.stringify(value);
    if (key === drawn) return;
    drawn = key;
    node.replaceChildren(...draw(value));
  };
}

// The clipboard is there for secure contexts only; a proxy on another machine is often plain http.
async function copyText(text, button) {
  const before = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyBySelection(text);
    button.textContent = 'Copied';
  } catch {
    button.textContent = 'Select and copy by hand';
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function copyBySelection(text) {
  const area = el('textarea', { text });
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  if (!done) throw new Error('copying was refused');
}
