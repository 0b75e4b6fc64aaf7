// The charts of the overview. Each card has its lines with their latest values, or those under the pointer.
const percent = (value) => `${(100 * value).toFixed(0)} %`;
const rate = (value) => amount(value);
const percentiles = (name) => ["p50", "p90", "p99"].map((level) => ({column: `${name}_${level}`, label: level}));
const CHARTS = [
  {id: "requests", title: "Requests", about: "Requests with a place in a batch, and requests that wait for one.", show: amount, top: 4,
    lines: [{column: "running", label: "running"}, {column: "waiting", label: "waiting"}]},
  {id: "tokens", title: "Tokens a second", about: "Prompt tokens of requests that ended, and output tokens sent to clients.", show: rate, top: 10,
    lines: [{column: "output_tokens", label: "out"}, {column: "prompt_tokens", label: "in"}]},
  {id: "ttft", title: "Time to first token", about: "From receipt of a request to its first token.", show: seconds, lines: percentiles("ttft")},
  {id: "itl", title: "Time between tokens", about: "Between one token of a stream and the next.", show: seconds, lines: percentiles("itl")},
  {id: "jct", title: "Completion time", about: "From receipt of a request to its last token.", show: seconds, lines: percentiles("jct")},
  {id: "memory", title: "KV memory", about: "Share of the KV pools in use, and the predicted peak of the fullest pool if no request joins.", show: percent, top: 1,
    lines: [{column: "kv_used", label: "in use"}, {column: "kv_peak", label: "predicted peak", dash: [5, 4]}]},
  {id: "refusals", title: "Refusals and errors a second", about: "Requests answered 429 or 503 unstarted, and requests that failed.", show: rate, top: 1,
    lines: [{column: "rejected", label: "refused"}, {column: "failed", label: "failed"}]},
  {id: "tenants", title: "Cost by tenant", about: "GPU-seconds a second of each tenant.", show: rate, top: 0.1, lines: []},
];

let range = "second";
const histories = {second: new History("second"), minute: new History("minute")};
const views = new Map();

function chartCard(spec) {
  const host = make("div", "plot");
  const values = make("div", "values");
  const head = make("h3", "", spec.title);
  head.title = spec.about;
  const card = make("section", "chart", head, values, host);
  card.dataset.testid = `chart-${spec.id}`;
  card.tabIndex = 0;
  byId("charts").append(card);
  views.set(spec.id, {card, host, values, chart: null, names: ""});
}

function linesOf(spec, history) {
  if (spec.id !== "tenants") return spec.lines.map((line) => ({...line, values: history.columns[line.column] ?? []}));
  return Object.entries(history.tenants).map(([name, values]) => ({label: name, values}));
}

function drawChart(spec, history) {
  const view = views.get(spec.id);
  const lines = linesOf(spec, history);
  view.card.hidden = !lines.length;
  if (!lines.length) return;
  const names = lines.map((line) => line.label).join("\n");
  if (names !== view.names) {
    view.host.replaceChildren();
    view.chart = new Chart(view.host, {lines, show: spec.show, top: spec.top, sync: "overview", span: () => RANGES[range].span_s,
      hover: (index) => { view.index = index; showValues(spec, linesOf(spec, histories[range])); }});
    view.names = names;
  }
  view.chart.set([history.at, ...lines.map((line) => line.values)]);
  showValues(spec, lines);
}

function showValues(spec, lines) {
  const {values, card, index} = views.get(spec.id);
  const shown = lines.map((line) => {
    const value = line.values[index ?? line.values.length - 1] ?? null;
    return [line.label, value === null ? "–" : spec.show(value)];
  });
  while (values.children.length > shown.length) values.lastElementChild.remove();
  shown.forEach(([label, text], at) => {
    if (!values.children[at]) values.append(make("span", `tag tag-${at % COLOURS.length + 1}`, make("i"), make("span"), make("b")));
    const [, name, number] = values.children[at].children;
    setText(name, label);
    setText(number, text);
  });
  card.setAttribute("aria-label", `${spec.title}: ${shown.map((pair) => pair.join(" ")).join(", ")}`);
}

function drawCharts() {
  for (const spec of CHARTS) drawChart(spec, histories[range]);
}

CHARTS.forEach(chartCard);
for (const button of document.querySelectorAll("[data-range]")) {
  button.addEventListener("click", async () => {
    range = button.dataset.range;
    for (const other of document.querySelectorAll("[data-range]")) other.setAttribute("aria-pressed", String(other === button));
    drawCharts();
    await histories[range].update().catch(() => {});  // the next turn of `repeat` says what is wrong
    drawCharts();
  });
}

let updates = 0;
repeat(async () => {
  if (updates++ % (RANGES[range].everyMs / 1000) === 0 || !histories[range].at.length) {
    await histories[range].update();
    drawCharts();
  }
}, 1000, (problem) => setText(byId("charts-note"), problem === null ? "" : `The history cannot be read: ${problem}. Trying again.`));
