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

function groupsOf(requests) {
  const groups = new Map(STATES_SHOWN.map((state) => [state, 0]));
  for (const row of requests) {
    const group = row.state === "waiting" && row.level ? `waiting, level ${row.level}` : row.state;
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
const span = () => RANGES.second.span_s;
const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(bytes < 1e7 ? 1 : 0)} MiB`;
const queues = new Chart(byId("queues"), {lines: [{label: "running"}, {label: "waiting"}], show: amount, top: 4, sync: "scheduler", span});
const moved = new Chart(byId("moved"), {lines: [{label: "moved"}], show: mebibytes, top: 2 ** 20, sync: "scheduler", span});

function drawHistory(more) {
  history15.take(more);
  const {at, columns} = history15;
  if (!at.length) return;
  queues.set([at, columns.running, columns.waiting]);
  moved.set([at, columns.moved_bytes]);
}

follow({requests: drawReplicas, series: drawHistory}, {query: () => history15.query});
