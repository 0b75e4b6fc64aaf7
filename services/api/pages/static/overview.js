// The charts of the overview. Each card has its lines with their latest values, or those under the pointer.
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
  {id: "refusals", title: "Refusals and errors a second", about: "Requests answered 429 or 503 unstarted, requests that failed, and requests whose clients left before the end.", show: rate, top: 1,
    lines: [{column: "rejected", label: "refused"}, {column: "failed", label: "failed"}, {column: "abandoned", label: "abandoned"}]},
  {id: "tenants", title: "Cost by tenant", about: "GPU-seconds a second of each tenant.", show: rate, top: 0.1, lines: [], none: "No tenant has used the device yet."},
];

const histories = {second: new History("second"), minute: new History("minute")};
const span = () => RANGES[ranges.value].span_s;
const cards = CHARTS.map((spec) => new ChartCard({...spec, span}));
byId("charts").append(...cards.map((card) => card.node));

function linesOf(spec, history) {
  if (spec.id !== "tenants") return spec.lines.map((line) => ({...line, values: history.columns[line.column] ?? []}));
  return Object.entries(history.tenants).map(([name, values]) => ({label: name, values}));
}

function drawCharts() {
  for (const card of cards) {
    const history = histories[ranges.value], lines = linesOf(card.spec, history);
    card.draw(history.at, lines);
  }
}

const ranges = new RangeButtons(() => {
  drawCharts();
  askAgain();
});
const tellCharts = (problem) => setText(byId("charts-note"), problem === null ? "" : `The history cannot be read: ${problem}. Trying again.`);
const askAgain = follow({
  status: takeStatus,
  series: (more) => {
    histories[ranges.value].take(more);
    drawCharts();
  },
}, {
  query: () => histories[ranges.value].query,
  wants: (part) => part !== "series" || ranges.due(histories[ranges.value]),
  tell: noteAnswer,
  tellPart: (part) => part === "series" ? tellCharts : noteAnswer,
});
