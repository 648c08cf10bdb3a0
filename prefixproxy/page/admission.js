// The admission settings as a form. Names, bounds and descriptions come from the proxy, so a new setting shows up here.

const admission = { values: {} };

function fieldFor(name, schema, value) {
  const id = `admission-${name}`;
  const hint = el('p', { class: 'small', id: `${id}-hint`, text: (schema.description ?? '').replaceAll('`', '') });
  return el('div', { class: 'field' }, el('label', { for: id, text: words(name) }), inputFor(id, schema, value), hint);
}

function inputFor(id, schema, value) {
  const common = { id, 'aria-describedby': `${id}-hint` };
  if (schema.enum) {
    const select = el('select', common, ...schema.enum.map((each) => option(each, each)));
    select.value = value;
    return select;
  }
  if (schema.type === 'boolean') return el('input', { ...common, type: 'checkbox', checked: value });
  const numeric = schema.type === 'integer' || schema.type === 'number';
  const step = schema.type === 'integer' ? '1' : 'any';
  return el('input', { ...common, type: numeric ? 'number' : 'text', value: String(value), ...(numeric ? { step, min: schema.minimum } : {}) });
}

async function loadAdmission() {
  const [values, schema] = await Promise.all([getJson('/prefixproxy/admission'), getJson('/prefixproxy/admission/schema')]);
  admission.values = values;
  const fields = Object.entries(schema.properties).filter(([name]) => name in values);
  byId('admission-fields').replaceChildren(...fields.map(([name, one]) => fieldFor(name, one, values[name])));
}

function valueOf(input) {
  if (input.type === 'checkbox') return input.checked;
  // What is no number goes as it is: the proxy says best what is wrong with it.
  return input.type === 'number' && input.value !== '' ? Number(input.value) : input.value;
}

function changedSettings() {
  const pairs = Object.keys(admission.values).map((name) => [name, byId(`admission-${name}`)]);
  return Object.fromEntries(pairs.filter(([name, input]) => input && valueOf(input) !== admission.values[name])
    .map(([name, input]) => [name, valueOf(input)]));
}

function tellAdmission(state, text) {
  const message = byId('admission-message');
  message.dataset.state = state;
  setText(message, text);
}

function markWrong(names) {
  for (const name of Object.keys(admission.values)) byId(`admission-${name}`)?.setAttribute('aria-invalid', String(names.includes(name)));
}

async function applyAdmission(event) {
  event.preventDefault();
  const changes = changedSettings();
  const names = Object.keys(changes);
  markWrong([]);
  if (!names.length) return tellAdmission('done', 'Nothing was changed.');
  const empty = names.filter((name) => changes[name] === '' && byId(`admission-${name}`).type === 'number');
  if (empty.length) {
    markWrong(empty);
    return tellAdmission('error', `${empty.map(words).join(', ')}: a number is missing.`);
  }
  try {
    admission.values = await patchJson('/prefixproxy/admission', changes);
    tellAdmission('done', `In force: ${names.map((name) => `${words(name)} ${admission.values[name]}`).join(', ')}.`);
  } catch (failure) {
    markWrong(names.filter((name) => failure.message.includes(name)));
    tellAdmission('error', failure.message);
  }
}

function undoAdmission(event) {
  event.preventDefault();
  for (const [name, value] of Object.entries(admission.values)) {
    const input = byId(`admission-${name}`);
    if (input?.type === 'checkbox') input.checked = value;
    else if (input) input.value = value;
  }
  markWrong([]);
  tellAdmission('', '');
}
