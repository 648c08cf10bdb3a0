// Numbers and names as a reader wants them. Unknown is a dash, never a zero.

const UNKNOWN = '–';
const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const count = (value) => (isNumber(value) ? whole.format(value) : UNKNOWN);

function short(value) {
  if (!isNumber(value)) return UNKNOWN;
  const [size, unit] = value >= 1e9 ? [1e9, ' G'] : value >= 1e6 ? [1e6, ' M'] : value >= 1e4 ? [1e3, ' k'] : [1, ''];
  const scaled = value / size;
  return `${size > 1 && scaled < 100 ? scaled.toFixed(1) : whole.format(scaled)}${unit}`;
}

function percent(part, all) {
  if (!isNumber(part) || !isNumber(all) || all <= 0) return UNKNOWN;
  const share = (100 * part) / all;
  return `${share > 99 && share < 100 ? share.toFixed(1) : whole.format(share)} %`;
}

function seconds(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (value < 1) return `${whole.format(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const milliseconds = (value) => (isNumber(value) ? seconds(value / 1000) : UNKNOWN);
const bytes = (value) => (isNumber(value) ? `${whole.format(value)} bytes` : UNKNOWN);

const clock = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const timeOfDay = (unix) => clock.format(unix * 1000);

const words = (name) => name.replaceAll('_', ' ');
const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;

// A family keeps its colour over restarts and in every browser, so it comes from the name alone.
function hueOf(name) {
  let hash = 2166136261;
  for (let i = 0; i < name.length; i += 1) hash = Math.imul(hash ^ name.charCodeAt(i), 16777619);
  // Neighbouring hashes must not look alike: steps of the golden angle, away from nothing and near nothing.
  return Math.round(((hash >>> 0) % 997) * 137.508) % 360;
}

const isDark = matchMedia('(prefers-color-scheme: dark)');

const colours = new Map(); // thousands of bars ask for theirs in every frame
isDark.addEventListener('change', () => colours.clear());

function familyColour(name) {
  if (!name) return 'gray';
  if (colours.size > 1000) colours.clear();
  if (!colours.has(name)) colours.set(name, mixColour(name));
  return colours.get(name);
}

// Two lightnesses tell more families apart than hue alone.
function mixColour(name) {
  const hue = hueOf(name);
  const light = (isDark.matches ? 66 : 50) - (name.charCodeAt(name.length - 1) % 2) * 14;
  return `hsl(${hue} ${isDark.matches ? 58 : 65}% ${light}%)`;
}
