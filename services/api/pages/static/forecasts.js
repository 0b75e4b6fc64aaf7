// Forecasts against what came of them, for the requests that ended while the page was open, and the learned models.
const MAX_SEEN = 1000;
const seen = new Map();  // "response id/choice" -> [predicted, true]
const scatter = new Chart(byId("scatter"), {lines: [{label: "true length", dots: true}, {label: "as predicted", dash: [5, 4]}], show: amount, xs: amount, height: 300, top: 10});

function drawScatter() {
  const pairs = [...seen.values()].sort((a, b) => a[0] - b[0]);
  if (!pairs.length) return;
  const error = pairs.reduce((sum, [predicted, real]) => sum + Math.abs(predicted - real), 0) / pairs.length;
  const under = pairs.filter(([predicted, real]) => real <= predicted).length / pairs.length;
  setText(byId("error"), `${counted(pairs.length, "request")}: mean error ${amount(error)} tokens; ${Math.round(100 * under)} % of them no longer than predicted. Across: predicted tokens; up: true tokens; dashed: equal.`);
  scatter.set([pairs.map(([predicted]) => predicted), pairs.map(([, real]) => real), pairs.map(([predicted]) => predicted)]);
}

function takeEnded(view) {
  for (const each of view.replicas.flatMap((replica) => replica.ended)) {
    if (each.predicted_len === null || each.reason === "abort") continue;
    seen.set(`${each.response_id}/${each.choice}`, [each.predicted_len, each.output_len]);
  }
  while (seen.size > MAX_SEEN) seen.delete(seen.keys().next().value);
  drawScatter();
}

function showVersions(status) {
  const learned = status.learned.filter((each) => each.num_examples > 0 || each.current);  // not what only has to be kept
  byId("no-versions").hidden = learned.length > 0;
  byId("versions").tBodies[0].replaceChildren(...learned.map((each) => make("tr", "", ...[
    each.kind, each.version, each.score === null ? "–" : each.score.toPrecision(4), whole(each.num_examples), clock(1000 * each.created_at), each.current ? "yes" : "no",
  ].map((text) => make("td", "", String(text))))));
}

// Calibration and drift: ratios over the points of a moving window, since single seconds hold few requests.
const WINDOWS = {second: 60, minute: 15};
const RATIOS = [
  {id: "coverage", title: "Calibration", about: "Share of requests that were no longer than the forecast's median and 90th percentile: 50 % and 90 % if it is calibrated.", show: percent, top: 1,
    lines: [{label: "within the median", over: "within_p50"}, {label: "within p90", over: "within_p90"}]},
  {id: "drift", title: "Error and drift, tokens", about: "Mean distance between forecast and truth, and forecast minus truth; a line that leaves zero is a drift.", show: amount, low: true,
    lines: [{label: "mean error", over: "error_tokens"}, {label: "forecast minus truth", over: "excess_tokens"}]},
  {id: "ended", title: "Forecasts that ended, a minute", about: "Requests with a forecast that ended.", show: amount, top: 1, lines: [{label: "requests", over: null}]},
];
const histories = {second: new History("second"), minute: new History("minute")};
const cards = RATIOS.map((spec) => new ChartCard({...spec, span: () => ranges.span_s, none: "No request with a forecast has ended yet."}));
byId("charts").append(...cards.map((card) => card.node));

// Sums over the window that ends at each point.
function moving(values, size) {
  let sum = 0;
  return values.map((value, at) => {
    sum += value ?? 0;
    if (at >= size) sum -= values[at - size] ?? 0;
    return sum;
  });
}

function drawRatios() {
  const history = histories[ranges.step], size = WINDOWS[ranges.step];
  const num = moving(history.columns.forecast_num_requests ?? [], size);
  const any = num.some((each) => each > 1e-9);
  setText(byId("window"), `Over the last ${ranges.step === "second" ? "minute" : "15 minutes"} before each point.`);
  for (const card of cards) {
    const lines = card.spec.lines.map(({label, over}) => {
      const sums = over === null ? num : moving(history.columns[`forecast_${over}`] ?? [], size);
      return {label, values: sums.map((sum, at) => num[at] > 1e-9 ? (over === null ? sum * (ranges.step === "second" ? 1 : 60 / size) : sum / num[at]) : over === null ? 0 : null)};
    });
    card.draw(history.at, any ? lines : []);
  }
}

const ranges = new RangeButtons(() => {
  drawRatios();
  askAgain();
});
const askAgain = follow({
  series: (more) => {
    histories[ranges.step].take(more);
    drawRatios();
  },
  requests: takeEnded,
  status: (status) => {
    showHealth(status);
    showVersions(status);
    byId("no-forecasts").hidden = !status.no_forecasts;
    setText(byId("no-forecasts"), status.no_forecasts ?? "");
  },
}, {query: () => histories[ranges.step].query, wants: (part) => part !== "series" || ranges.due(histories[ranges.step])});
