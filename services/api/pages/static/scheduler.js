// One panel for each replica: who has a place, who waits at which level, and the memory predicted for its batch.
const panels = new Map();

function panelOf(name) {
  if (!panels.has(name)) {
    const host = make("div", "plot");
    const panel = {node: make("section", "panel"), sums: make("p", "note"), queue: make("div", "queue"), host};
    const about = make("p", "note", "KV tokens after so many further decoding steps, if no request joins; dashed: the pool.");
    panel.node.append(make("h2", "", `Replica ${name}`), panel.sums, panel.queue, make("h3", "", "Predicted KV memory"), about, host);
    panel.node.dataset.testid = `scheduler-${name}`;
    panel.chart = new Chart(host, {lines: [{label: "predicted"}, {label: "pool", dash: [5, 4]}], show: amount, xs: (steps) => whole(steps), height: 160});
    panels.set(name, panel);
  }
  return panels.get(name);
}

const RANKS_S = [0.1, 0.3, 1, 3, 10, 30, 100];  // upper ends of the groups of an order that ranks by time

// Where a waiting request stands in the queue: its level of the MLFQ, or the range of its rank.
function standing(row) {
  if (row.level) return `level ${row.level}`;
  if (row.rank_s === null) return "in order of arrival";
  const end = RANKS_S.find((each) => row.rank_s < each);
  return end === undefined ? `rank ${seconds(RANKS_S[RANKS_S.length - 1])} and more` : `rank below ${seconds(end)}`;
}

function groupsOf(requests) {
  const groups = new Map(STATES_SHOWN.map((state) => [state, 0]));
  for (const row of [...requests].sort((a, b) => a.level - b.level || (a.rank_s ?? 0) - (b.rank_s ?? 0))) {
    const group = row.state === "waiting" ? `waiting, ${standing(row)}` : row.state;
    groups.set(group, (groups.get(group) ?? 0) + 1);
  }
  return [...groups].filter(([, count]) => count > 0);
}

const STATES_SHOWN = ["decode", "prefill", "paused", "offloaded", "waiting"];

function drawQueue(panel, replica) {
  const groups = groupsOf(replica.requests);
  const most = Math.max(1, ...groups.map(([, count]) => count));
  panel.queue.replaceChildren(...groups.flatMap(([name, count]) => {
    const fill = make("span");
    fill.style.width = `${100 * count / most}%`;
    return [make("span", "label", name), make("span", "track", fill), make("span", "", whole(count))];
  }));
}

function drawCurve(panel, replica) {
  const points = replica.curve.length ? replica.curve : [{steps: 0, tokens: 0}, {steps: 100, tokens: 0}];
  const steps = points.map((point) => point.steps);
  panel.chart.set([steps, points.map((point) => point.tokens), points.map(() => replica.capacity_tokens)]);
}

function drawReplicas(view) {
  const replicas = [...view.replicas].sort((a, b) => natural(a.replica, b.replica));
  for (const replica of replicas) {
    const panel = panelOf(replica.replica);
    const peak = Math.max(0, ...replica.curve.map((point) => point.tokens));
    const share = replica.capacity_tokens ? `, predicted peak ${whole(100 * peak / replica.capacity_tokens)} % of ${amount(replica.capacity_tokens)} tokens` : "";
    setText(panel.sums, `${replica.num_running} running, ${replica.num_waiting} waiting, ${replica.num_offloaded} with KV on the host${share}`);
    drawQueue(panel, replica);
    drawCurve(panel, replica);
  }
  if (replicas.length) byId("replicas").replaceChildren(...replicas.map((replica) => panels.get(replica.replica).node));
}

const history15 = new History("second");
const span = () => POINTS.second;
const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(bytes < 1e7 ? 1 : 0)} MiB`;
const queues = new ChartCard({id: "queues", title: "Places and queue", about: "Requests with a place, and requests that wait, on all replicas.", show: amount, top: 4, span});
const moved = new ChartCard({id: "moved", title: "Offload traffic a second", about: "Bytes of KV copied between device and host.", show: mebibytes, top: 2 ** 20, span});
byId("traffic").append(queues.node, moved.node);

function drawHistory(more) {
  history15.take(more);
  const {at, columns} = history15;
  if (!at.length) return;
  queues.draw(at, ["running", "waiting"].map((name) => ({label: name, values: columns[name]})));
  moved.draw(at, [{label: "both ways", values: columns.moved_bytes}]);
}

// In batch mode: the last batches with what Magnus counts of them.
let inBatches = false;

function drawBatches(more) {
  const rows = more.decisions.filter((each) => "batch_size" in each.facts || each.kind === "batch_ended").map(({at, kind, facts}) => {
    const ended = kind === "batch_ended", number = (name) => name in facts ? whole(facts[name]) : "–";
    return [clock(1000 * at), ended ? "ended" : "pulled", facts.replica, number(ended ? "num_requests" : "batch_size"), number("batch_len"),
      ended ? `${number("generation_len")} of ${number("predicted_len")}` : number("generation_len"),
      "waste_tokens" in facts ? `${number("waste_tokens")} of ${number("waste_limit_tokens")}` : "–",
      ended ? `${seconds(facts.took_s)} of ${seconds(facts.estimated_s)}` : "–"];
  });
  byId("batches").tBodies[0].replaceChildren(...rows.map((cells) => make("tr", "", ...cells.map((text) => make("td", "", text)))));
  byId("no-batches").hidden = rows.length > 0;
}

function showKinds(status) {
  showHealth(status);
  inBatches = status.actors.some((row) => row.kind === "Batcher");
  byId("batches-panel").hidden = !inBatches;
}

follow({requests: drawReplicas, series: drawHistory, status: showKinds, components: drawBatches}, {
  query: () => ({...history15.query, kind: "Batcher"}),
  wants: (part) => part !== "components" || inBatches,
});
