// One kind of component: its queue, rates, decisions, versions, health and restarts over time. Which kinds there are, and
// what each counts, comes from the server, so that a new kind needs nothing here.
const ABOUT = {
  Ingress: "Takes HTTP requests in and sends tokens to clients.",
  Router: "Places each request on a replica.",
  Batcher: "Forms batches and hands them to idle workers, in place of the Router.",
  Scheduler: "Decides what one replica runs next, and whose KV memory it keeps.",
  ModelWorker: "Runs the model, step by step.",
  Rank: "Holds a part of a model that several processes share.",
  KVOffloadManager: "Decides whose KV moves between device and host.",
  LengthPredictor: "Forecasts how long outputs will be.",
  ServingTimeEstimator: "Learns how long steps and batches take.",
  ImageEncoder: "Turns pictures into embeddings.",
  OpenAIBackend: "Stands for a replica that is another server.",
  LogStore: "Keeps the log of finished requests, and what was learned from it.",
  StreamStore: "Keeps resumable streams for their clients.",
  Supervisor: "Starts what has died again, and keeps this history.",
};
const LEARNS = {LengthPredictor: "length-predictor", ServingTimeEstimator: "batch-times"};
const ORDER = Object.keys(ABOUT);
const OWN = {health: null, queue: {column: "queue", title: "Queue", about: "Requests or messages that it has and has not finished.", show: amount, top: 4},
  restarts: {column: "restarts", title: "Restarts", about: "How often the Supervisor has started it again.", show: amount, top: 1}};
const HEALTH_CLASSES = ["ready", "away", "down"];
let kind = "", components = [];
let tables = {};
let grid = null;

const levelOf = (row) => isDown(row) ? "bad" : row.state === "ready" && !row.degraded ? "ok" : "warn";
const place = (name) => ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length;

function clearKind(name) {
  kind = name;
  tables = {second: new History("second", ["lines"]), minute: new History("minute", ["lines"])};
  byId("charts").replaceChildren();
  grid = new LineGrid(byId("charts"), () => tables[ranges.step], () => ranges.span_s);
  for (const id of ["lives", "decisions", "events"]) byId(id).replaceChildren();
  setText(byId("kind"), kind);
  setText(byId("about"), Object.hasOwn(ABOUT, kind) ? ABOUT[kind] : "");
  document.title = `Farsight: ${kind}`;
}

const asked = () => decodeURIComponent(location.hash.slice(1));

function drawKinds(actors) {
  const kinds = [...new Set(actors.map((row) => row.kind))].sort((a, b) => place(a) - place(b) || natural(a, b));
  if (!kinds.length) return;
  const wanted = kinds.includes(asked()) ? asked() : kinds.includes(kind) ? kind : kinds[0];
  if (wanted !== kind) {
    clearKind(wanted);
    queueMicrotask(() => askAgain());
  }
  const host = byId("kinds");
  const links = kinds.map((name) => {
    const rows = actors.filter((row) => row.kind === name);
    const level = rows.some((row) => levelOf(row) === "bad" || wasReplaced(row)) ? "bad" : rows.some((row) => levelOf(row) === "warn") ? "warn" : "ok";
    const link = [...host.children].find((each) => each.dataset.kind === name) ?? make("a", "", make("i"), name);
    Object.assign(link.dataset, {kind: name, level, testid: `kind-${name}`});
    link.href = `#${encodeURIComponent(name)}`;
    if (name === kind) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    link.title = level === "ok" ? `${rows.length} ready` : rows.filter((row) => levelOf(row) !== "ok").map((row) => `${row.name} ${row.state}`).join(", ");
    return link;
  });
  if (links.length !== host.children.length || links.some((link, at) => host.children[at] !== link)) host.replaceChildren(...links);
}

function drawComponents() {
  byId("components").tBodies[0].replaceChildren(...components.filter((row) => row.kind === kind).sort((a, b) => natural(a.name, b.name)).map((row) => {
    const died = wasReplaced(row);
    const state = make("span", "state", died ? "restarted" : row.state);
    state.dataset.level = died ? "bad" : levelOf(row);
    const remarks = make("td", "wide", [row.degraded, row.breaker && `breaker ${row.breaker}`, row.last_end && `last end: ${row.last_end}`].filter(Boolean).join("; ") || "–");
    const age = row.last_step_age_s === null ? "–" : `${seconds(row.last_step_age_s)} ago`;
    const line = make("tr", "", ...[row.name, state, whole(row.queue), age, whole(row.restarts), row.url || (row.pid ? `pid ${row.pid} · ${row.node}` : "no process")].map((content) => make("td", "", content)), remarks);
    line.dataset.testid = `row-${row.name}`;
    return line;
  }));
}

function drawVersions(learned) {
  const own = Object.hasOwn(LEARNS, kind) ? learned.filter((each) => each.kind.startsWith(LEARNS[kind])) : [];
  byId("versions-panel").hidden = !Object.hasOwn(LEARNS, kind);
  const rows = own.map((each) => [each.kind, each.version, each.score === null ? "–" : each.score.toPrecision(4), whole(each.num_examples), clock(1000 * each.created_at), each.current ? "yes" : "no"]);
  byId("versions").tBodies[0].replaceChildren(...(rows.length ? rows : [["nothing learned yet", "–", "–", "–", "–", "–"]]).map((cells) => make("tr", "", ...cells.map((text) => make("td", "", String(text))))));
}

function takeStatus(status) {
  showHealth(status);
  components = status.actors;
  drawKinds(components);
  drawComponents();
  drawVersions(status.learned);
}

// A lane for each component: in which state of health it was when.
function drawLives() {
  const {at, lines} = tables[ranges.step];
  if (!at.length) return;
  const span = ranges.span_s, end = at[at.length - 1];
  const found = Object.entries(lines).map(([name, values]) => [...JSON.parse(name), values]).filter(([, column]) => column === "health");
  byId("lives").replaceChildren(...found.sort((a, b) => natural(a[0], b[0])).flatMap(([name, , values]) => {
    const label = make("span", "name", name);
    label.title = name;
    return [label, laneOf(name, at, values, end - Math.min(span, Math.max(60, end - at[0])), end)];
  }));
}

function laneOf(name, at, values, from, end) {
  const lane = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img"})) lane.setAttribute(key, value);
  const x = (time) => 1000 * (time - from) / (end - from);
  const down = [];
  for (let first = 0, index = 1; index <= at.length; index++) {
    if (index < at.length && values[index] === values[first]) continue;
    const level = HEALTH_CLASSES[values[first]];
    if (level && at[index - 1] > from) {
      const began = first ? at[first - 1] : at[0] - 1, till = at[index - 1];
      const part = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const left = Math.max(0, x(began));
      for (const [key, value] of Object.entries({class: level, x: left, y: 0, width: Math.max(x(till) - left, 2), height: 14})) part.setAttribute(key, value);
      lane.append(part);
      if (level !== "ready") down.push(`${level === "down" ? "down" : "not ready"} from ${clock(1000 * began)} for ${seconds(till - began)}`);
    }
    first = index;
  }
  lane.setAttribute("aria-label", `${name}: ${down.length ? down.slice(-5).join(", ") : "ready all the time"}`);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = lane.getAttribute("aria-label");
  lane.append(title);
  return lane;
}

function specOf(column) {
  if (Object.hasOwn(OWN, column)) return OWN[column];
  return {column, title: `${column[0].toUpperCase()}${column.slice(1)} a second`, about: `How many ${column} it had a second.`, show: amount, top: 1};
}

function drawList(id, empty, rows) {
  byId(empty).hidden = rows.length > 0;
  byId(id).hidden = !rows.length;
  byId(id).replaceChildren(...rows.map(([at, by, text]) => make("li", "", make("span", "at", clock(1000 * at)), make("span", "by", by), make("div", "what", text))));
}

function takeHistory(more) {
  const table = tables[ranges.step];
  table.take(flat(more));
  const columns = [...new Set(Object.keys(table.lines).map((name) => JSON.parse(name)[1]))];
  grid.draw(columns.map(specOf).filter(Boolean));
  drawLives();
  setText(byId("left-out"), more.num_left_out ? `Not drawn: ${counted(more.num_left_out, "more component")}.` : "");
  drawList("decisions", "no-decisions", more.decisions.map((each) => [each.at, each.component, each.text]));
  drawList("events", "no-events", more.events.map((each) => [each.at, each.name, each.reason ? `${each.state}: ${each.reason}` : each.state]));
}

const ranges = new RangeButtons(() => {
  takeRange();
  askAgain();
});

function takeRange() {
  const table = tables[ranges.step];
  if (!table?.at.length) return;
  grid.draw([...new Set(Object.keys(table.lines).map((name) => JSON.parse(name)[1]))].map(specOf).filter(Boolean));
  drawLives();
}

const askAgain = follow({status: takeStatus, components: takeHistory}, {
  query: () => kind ? {kind, ...tables[ranges.step].query} : {},
  wants: (part) => part !== "components" || (kind !== "" && ranges.due(tables[ranges.step])),
});
addEventListener("hashchange", () => {
  drawKinds(components);
  drawComponents();
});
