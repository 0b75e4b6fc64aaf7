// The dashboard: large figures over the chosen range, their curves, what another preset would do, and the components.
const percentiles = (name) => ["p50", "p90", "p99"].map((level) => ({column: `${name}_${level}`, label: level}));
const CHARTS = [
  {id: "requests", title: "Requests", about: "Requests with a place in a batch, and requests that wait for one.", show: amount, top: 4,
    lines: [{column: "running", label: "running"}, {column: "waiting", label: "waiting"}]},
  {id: "tokens", title: "Tokens a second", about: "Output tokens sent to clients, and prompt tokens computed or found cached.", show: amount, top: 10,
    lines: [{column: "output_tokens", label: "out"}, {column: "prompt_tokens", label: "in"}]},
  {id: "ttft", title: "Time to first token", about: "From receipt of a request to its first token.", show: seconds, lines: percentiles("ttft")},
  {id: "itl", title: "Time between tokens", about: "Between one token of a stream and the next.", show: seconds, lines: percentiles("itl")},
  {id: "jct", title: "Completion time", about: "From receipt of a request to its last token.", show: seconds, lines: percentiles("jct")},
  {id: "memory", title: "KV memory", about: "Share of the KV pools in use, and the predicted peak of the fullest pool if no request joins.", show: percent, top: 1,
    lines: [{column: "kv_used", label: "in use"}, {column: "kv_peak", label: "predicted peak", dash: [5, 4]}]},
  {id: "refusals", title: "Refused, failed and abandoned a second", about: "Requests answered 429 or 503 unstarted, requests that failed, and requests whose clients left before the end.", show: amount, top: 1,
    lines: [{column: "rejected", label: "refused"}, {column: "failed", label: "failed"}, {column: "abandoned", label: "abandoned"}]},
  {id: "cost", title: "Cost", about: "Seconds of the device that a second of requests took, in all and by tenant.", show: amount, top: 0.1, lines: [{column: "gpu_s", label: "all"}]},
];
const WHAT_IF_MS = 20000;
const STEP_S = {second: 1, minute: 60};
const LEVELS = {ready: "ok", dead: "bad", lost: "bad", failed: "bad", gone: "bad", restarted: "bad", degraded: "warn"};
const stateOf = (row) => wasReplaced(row) ? "restarted" : row.degraded && row.state === "ready" ? "degraded" : row.state;
const levelOf = (row) => LEVELS[stateOf(row)] ?? "warn";  // starting, waiting, draining, or a state of a later release

const histories = {second: new History("second"), minute: new History("minute")};
const cards = CHARTS.map((spec) => new ChartCard({...spec, span: () => ranges.span_s}));
byId("charts").append(...cards.map((card) => card.node));
let status = null, ttft = [], modelKnown = false;

// The values of a column within the range; null where there is none.
function within(column) {
  const {at, columns} = histories[ranges.step], values = columns[column] ?? [];
  const first = at.findIndex((each) => each > at[at.length - 1] - ranges.span_s);
  return first < 0 ? [] : values.slice(first);
}

const there = (values) => values.filter((value) => value !== null);
const total = (column) => there(within(column)).reduce((sum, value) => sum + value, 0) * STEP_S[ranges.step];
const mean = (column) => total(column) / STEP_S[ranges.step] / Math.max(1, there(within(column)).length);
const now = (column) => {
  const values = there((histories.second.at.length ? histories.second : histories.minute).columns[column] ?? []);
  return values.length ? values[values.length - 1] : null;
};
const most = (column) => Math.max(0, ...there(within(column)));
const orNone = (value, show) => value === null || value === undefined ? "–" : show(value);
const perSecond = (value) => value > 0 && value < 0.1 ? value.toFixed(3) : value < 10 ? value.toFixed(2) : amount(value);

// [label, its number, unit, what is said below it, level]
function figuresNow() {
  const ended = total("ended"), [failed, abandoned, refused] = ["failed", "abandoned", "rejected"].map((name) => Math.round(total(name)));
  const tokens = total("output_tokens"), spent = total("gpu_s"), waiting = now("waiting"), used = now("kv_used");
  const kv = status?.kv, left = failed + abandoned;
  return [
    ["Requests", perSecond(mean("ended")), "/ s", `${counted(ended, "request")} ended`],
    ["Tokens", amount(mean("output_tokens")), "/ s", `${amount(tokens)} out, ${amount(total("prompt_tokens"))} in`],
    ["First token, median", orNone(ttft[0], seconds), "", "time to first token, p50"],
    ["First token, p99", orNone(ttft[2], seconds), "", ttft[1] === undefined || ttft[1] === null ? "no first token yet" : `p90 ${seconds(ttft[1])}`],
    ["Waiting", orNone(waiting, whole), "", `${orNone(now("running"), whole)} running; at most ${whole(most("waiting"))} waited`, waiting > 0 && status?.queue_delay_s > 10 ? "warn" : ""],
    ["KV memory", orNone(used, (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`), "", kv?.num_blocks ? `${whole(kv.num_blocks - kv.free_blocks)} of ${whole(kv.num_blocks)} blocks; peak ${percent(most("kv_peak"))} predicted` : "no pool reported", used > 0.95 ? "warn" : ""],
    ["Abandoned, failed", `${whole(abandoned)}, ${whole(failed)}`, "", `${left && ended ? `${(100 * left / ended).toFixed(1)} % of all; ` : ""}${counted(refused, "refusal")}`, failed ? "bad" : ""],
    ["Cost", tokens && spent ? amount(1000 * spent / tokens) : "–", tokens && spent ? "s / 1k" : "", `device seconds per 1,000 output tokens; busy ${percent(Math.min(1, mean("gpu_s") / Math.max(1, replicas())))}`],
  ];
}

const replicas = () => status?.actors.filter((row) => row.kind === "ModelWorker").length ?? 1;

function drawFigures() {
  const host = byId("figures");
  figuresNow().forEach(([label, number, unit, below, level = ""], at) => {
    if (!host.children[at]) host.append(make("div", "", make("dt"), make("dd", "", make("span"), " ", make("small")), make("dd", "below")));
    const tile = host.children[at], [value, rest] = tile.querySelectorAll("dd");
    tile.dataset.testid = `figure-${label.split(",")[0].toLowerCase().replace(/ /g, "-")}`;
    tile.dataset.level = level;
    setText(tile.querySelector("dt"), label);
    setText(value.children[0], number);
    setText(value.children[1], unit);
    setText(rest, below);
  });
}

function drawCharts() {
  const history = histories[ranges.step];
  for (const card of cards) {
    const tenants = card.spec.id === "cost" ? Object.entries(history.tenants).map(([name, values]) => ({label: name, values})) : [];
    card.draw(history.at, [...card.spec.lines.map((line) => ({...line, values: history.columns[line.column] ?? []})), ...tenants]);
  }
  drawFigures();
}

// The order in which a request passes them; other kinds follow.
const KINDS = ["Ingress", "LengthPredictor", "Router", "Batcher", "ServingTimeEstimator", "ImageEncoder", "Scheduler", "KVOffloadManager", "ModelWorker", "Rank", "OpenAIBackend", "LogStore", "Supervisor"];
const place = (kind) => KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length;
const inOrder = (a, b) => place(a.kind) - place(b.kind) || natural(a.kind, b.kind) || natural(a.name, b.name);
const worst = (rows) => ["bad", "warn"].find((level) => rows.some((row) => levelOf(row) === level)) ?? "ok";

function drawComponents(actors) {
  const rows = [...actors].sort(inOrder), kinds = [...new Set(rows.map((row) => row.kind))];
  byId("kinds").replaceChildren(...kinds.map((kind) => {
    const own = rows.filter((row) => row.kind === kind), level = worst(own);
    const mark = make("span", "", make("i"), own.length > 1 ? `${kind} × ${own.length}` : kind);
    mark.dataset.level = level;
    mark.dataset.testid = `kind-${kind}`;
    mark.title = own.map((row) => `${row.name}: ${stateOf(row)}`).join(", ");
    return mark;
  }));
  byId("components").tBodies[0].replaceChildren(...rows.map((row) => {
    const link = make("a", "", row.name), state = make("span", "state", stateOf(row));
    link.href = `${ROOT}dashboard/services#${encodeURIComponent(row.kind)}`;
    state.dataset.level = levelOf(row);
    const stepped = row.last_step_age_s === null ? (row.queue ? "first one under way" : "idle so far") : `${seconds(row.last_step_age_s)} ago`;
    const remarks = [row.degraded, row.breaker && `breaker ${row.breaker}`, row.last_end && `last end: ${row.last_end}`].filter(Boolean).join("; ");
    const cells = [link, state, whole(row.queue), stepped, whole(row.restarts), row.url || (row.pid ? `pid ${row.pid} · ${row.node}` : "no process"), remarks || "–"];
    const line = make("tr", "", ...cells.map((content, at) => make("td", at > 1 && at < 5 ? "number" : at === 6 ? "wide" : "", content)));
    line.dataset.testid = `row-${row.name}`;
    return line;
  }));
}

async function readModel() {
  const [model] = (await getJson("v1/models")).data;
  setText(byId("model"), model.id);
  byId("model").title = `${whole(model.max_model_len)} tokens`;
  byId("emulated").hidden = model.emulated === null;
  setText(byId("emulated-text"), `The device is emulated (${model.emulated}): answers are made up.`);
  modelKnown = true;
}

function takeStatus(found) {
  status = found;
  showHealth(found);
  if (byId("preset").textContent !== (found.preset ?? "–")) {
    setText(byId("preset"), found.preset ?? "–");
    byId("other-preset").value = found.preset === "farsight" ? "fcfs" : "farsight";
  }
  setText(byId("updated"), clock(Date.now()));
  drawComponents(found.actors);
  drawFigures();
  if (!modelKnown) readModel().catch(() => {});  // the next answer asks again
}

function bar(name, value, top, className) {
  const fill = make("span", className);
  fill.style.width = `${top > 0 ? 100 * value / top : 0}%`;
  return [make("span", "", name), make("span", "track", fill), make("b", "", seconds(value))];
}

async function askOther() {
  const preset = byId("other-preset").value, button = byId("other-ask"), said = byId("other-said");
  button.disabled = true;
  byId("other-bars").hidden = true;
  setText(said, "Simulating …");
  try {
    const reply = await ask(`${ROOT}live/what-if?${new URLSearchParams({preset})}`, WHAT_IF_MS);
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error?.message ?? `the server answered ${reply.status}`);
    const {logged, changed} = body, was = byId("preset").textContent;
    const pairs = [["end, mean", "jct_s"], ["end, p99", "jct_p99_s"], ["first token, mean", "ttft_s"]];
    byId("other-bars").replaceChildren(...pairs.flatMap(([name, field]) => {
      const top = Math.max(logged[field], changed[field]);
      return [...bar(`${name}, ${was}`, logged[field], top, ""), ...bar(`${name}, ${preset}`, changed[field], top, "then")];
    }));
    byId("other-bars").hidden = false;
    setText(said, body.text);
  } catch (error) {
    setText(said, reasonOf(error));
  }
  button.disabled = false;
}

const ranges = new RangeButtons(() => {
  ttft = [];
  drawCharts();
  askAgain();
});
const tellCharts = (problem) => setText(byId("charts-note"), problem === null ? "" : `The history cannot be read: ${problem}. Trying again.`);
const tellServer = (problem) => {
  if (problem !== null) modelKnown = false;  // the server that comes back may serve another model
  inBanner("The server")(problem);
};
const askAgain = follow({
  status: takeStatus,
  series: (more) => {
    histories[ranges.step].take(more);
    ttft = more.ttft_s;
    drawCharts();
  },
}, {
  query: () => ({...histories[ranges.step].query, span: ranges.span_s}),
  wants: (part) => part !== "series" || ranges.due(histories[ranges.step]),
  tell: tellServer,
  tellPart: (part) => part === "series" ? tellCharts : null,
});
byId("other-ask").addEventListener("click", askOther);
