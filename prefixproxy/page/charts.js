// Small charts of the last hour, drawn as SVG.

const CHART = { width: 300, height: 62, top: 6, bottom: 14 };
const SHORTEST_SPAN = 300;
const LONGEST_SPAN = 3600;

// A young proxy shows minutes, an old one the hour, so that the line is never squeezed into a corner.
function chartSpan() {
  const first = store.steps.size ? Math.min(...store.steps.keys()) : serverNow();
  const wanted = Math.ceil((serverNow() - first + 30) / 300) * 300;
  return Math.min(LONGEST_SPAN, Math.max(SHORTEST_SPAN, wanted));
}

// Every step of the span, those without requests as well.
function chartSteps(span) {
  const size = store.stepSeconds;
  const last = Math.floor(serverNow() / size) * size;
  const times = Array.from({ length: Math.round(span / size) }, (_, i) => last - span + size * (i + 1));
  return times.map((time) => store.steps.get(time) ?? { time, requests: 0, cached: 0, evaluated: 0, saved_s: 0 });
}

function frameOf(node, span, top) {
  const width = node.clientWidth || CHART.width;
  node.setAttribute('viewBox', `0 0 ${width} ${CHART.height}`);
  const y = CHART.height - CHART.bottom;
  const ago = `${Math.round(span / 60)} min ago`;
  return [
    svg('line', { class: 'axis', x1: 0, x2: width, y1: y + 0.5, y2: y + 0.5 }),
    svg('text', { x: 0, y: CHART.height - 2, text: ago }),
    svg('text', { x: width, y: CHART.height - 2, 'text-anchor': 'end', text: 'now' }),
    svg('text', { x: width, y: 4, 'text-anchor': 'end', text: top }),
  ];
}

const scaleY = (share) => CHART.top + (CHART.height - CHART.top - CHART.bottom) * (1 - share);

// A step without tokens has no hit rate: the line has a gap there, not a zero.
function drawRate(node, steps, span) {
  const width = node.clientWidth || CHART.width;
  const runs = [[]];
  steps.forEach((step, i) => {
    const all = step.cached + step.evaluated;
    if (all > 0) runs.at(-1).push([((i + 0.5) / steps.length) * width, scaleY(step.cached / all)]);
    else if (runs.at(-1).length) runs.push([]);
  });
  const shapes = runs.filter((run) => run.length).flatMap((run) => {
    const wide = run.length > 1 ? run : [[run[0][0] - 2, run[0][1]], [run[0][0] + 2, run[0][1]]];
    const line = wide.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(' ');
    const floor = scaleY(0);
    return [
      svg('polygon', { class: 'area', points: `${wide[0][0]},${floor} ${line} ${wide.at(-1)[0]},${floor}` }),
      svg('polyline', { class: 'line', points: line }),
    ];
  });
  node.replaceChildren(...frameOf(node, span, '100 %'), ...shapes);
}

// Bars of one or two values on top of each other.
function drawBars(node, steps, span, names, format) {
  const width = node.clientWidth || CHART.width;
  const sums = steps.map((step) => names.reduce((sum, name) => sum + step[name], 0));
  const highest = Math.max(...sums, 1e-9);
  const each = width / steps.length;
  const shapes = steps.flatMap((step, i) => {
    let below = 0;
    return names.filter((name) => step[name] > 0).map((name) => {
      const [from, to] = [scaleY(below / highest), scaleY((below + step[name]) / highest)];
      below += step[name];
      const kind = name === names[0] ? 'bar' : 'bar2';
      const bar = { class: kind, x: (i * each).toFixed(1), y: to.toFixed(1) };
      return svg('rect', { ...bar, width: Math.max(1, each - 1).toFixed(1), height: Math.max(0.5, from - to).toFixed(1) });
    });
  });
  const top = Math.max(...sums) > 0 ? format(Math.max(...sums)) : '';
  node.replaceChildren(...frameOf(node, span, top), ...shapes);
}

function drawTiles() {
  const total = store.total;
  if (!total) return;
  const now = lastMinute();
  setText(byId('hit-now'), percent(now.cached, now.cached + now.evaluated));
  const since = percent(total.cached, total.cached + total.evaluated);
  setText(byId('hit-detail'), `last minute; ${since} since the start`);
  setText(byId('saved-total'), short(total.cached));
  setText(byId('saved-detail'), `reused; ${short(total.evaluated)} evaluated since the start`);
  setText(byId('seconds-total'), total.saved_s > 0 ? seconds(total.saved_s) : UNKNOWN);
  setText(byId('requests-now'), count(now.requests));
  setText(byId('requests-detail'), `last minute; ${short(total.requests)} since the start`);
}

function drawCharts() {
  const span = chartSpan();
  const steps = chartSteps(span);
  drawRate(byId('hit-chart'), steps, span);
  drawBars(byId('saved-chart'), steps, span, ['cached', 'evaluated'], short);
  drawBars(byId('seconds-chart'), steps, span, ['saved_s'], seconds);
  drawBars(byId('requests-chart'), steps, span, ['requests'], count);
  describeCharts(steps, span);
}

function describeCharts(steps, span) {
  const sum = (name) => steps.reduce((all, step) => all + step[name], 0);
  const [cached, evaluated] = [sum('cached'), sum('evaluated')];
  const when = `in the last ${Math.round(span / 60)} minutes`;
  const texts = {
    'hit-chart': `Hit rate ${percent(cached, cached + evaluated)} ${when}`,
    'saved-chart': `${count(cached)} tokens reused, ${count(evaluated)} evaluated ${when}`,
    'seconds-chart': `${seconds(sum('saved_s'))} of prefill saved ${when}`,
    'requests-chart': `${plural(sum('requests'), 'request', 'requests')} ${when}`,
  };
  for (const [id, text] of Object.entries(texts)) byId(id).setAttribute('aria-label', text);
}
