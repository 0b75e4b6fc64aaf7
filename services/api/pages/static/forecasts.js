// Forecasts against what came of them, for the requests that ended while the page was open, and the learned models.
const MAX_SEEN = 1000;
const seen = new Map();  // "response id/choice" -> [predicted, true]
const scatter = new Chart(byId("scatter"), {lines: [{label: "true length", dots: true}, {label: "as predicted", dash: [5, 4]}], show: amount, xs: amount, height: 300, top: 10});

function drawScatter() {
  const pairs = [...seen.values()].sort((a, b) => a[0] - b[0]);
  if (!pairs.length) return;
  const error = pairs.reduce((sum, [predicted, real]) => sum + Math.abs(predicted - real), 0) / pairs.length;
  const under = pairs.filter(([predicted, real]) => real <= predicted).length / pairs.length;
  setText(byId("error"), `${pairs.length} requests: mean error ${amount(error)} tokens; ${Math.round(100 * under)} % were no longer than predicted. Across: predicted tokens; up: true tokens; dashed: equal.`);
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

function showVersions({learnt}) {
  byId("versions").tBodies[0].replaceChildren(...learnt.map((each) => make("tr", "", ...[
    each.kind, each.version, each.score === null ? "–" : each.score.toPrecision(4), whole(each.num_examples), clock(1000 * each.created_at), each.current ? "yes" : "no",
  ].map((text) => make("td", "", String(text))))));
}

follow({
  requests: takeEnded,
  status: (status) => {
    showHealth(status);
    showVersions(status);
  },
});
