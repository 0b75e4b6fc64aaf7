// The race: the lanes of both services, polled; a click explains a request, a button kills a worker.
const LOOK_MS = 400;
const WIDTH = 1000;
const LEAST_S = 20;
let view = null;
let picked = null;  // {side, lane}

async function ask(address, options = {}) {
  return fetch(address, {cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(2 * TIMEOUT_MS), ...options});
}

function figure(name, text) {
  const value = make("b", "", "–");
  value.dataset.value = name;
  value.dataset.testid = name;
  return make("div", "figure", value, text);
}

function buildSide(index) {
  const title = make("h2", "", "…");
  const kill = make("button", "", "SIGKILL its worker");
  kill.type = "button";
  kill.dataset.testid = "kill";
  const said = make("span", "said");
  said.setAttribute("role", "status");
  kill.addEventListener("click", () => killWorker(index, said));
  const drawing = svg("svg", {class: "lanes", preserveAspectRatio: "none", role: "img", tabindex: 0, "data-testid": "lanes"});
  drawing.addEventListener("click", (event) => {
    const box = drawing.getBoundingClientRect();
    pick(index, Math.floor((event.clientY - box.top) / box.height * view.kinds.length));
  });
  drawing.addEventListener("keydown", (event) => moveBy(index, event));
  const figures = make("div", "figures", figure("mean", "mean completion"), figure("p99", "99th percentile"), figure("ended", "ended"), figure("open", "open streams"));
  byId(`side-${index}`).replaceChildren(make("div", "head", title, make("div", "", said, " ", kill)), figures, drawing);
}

async function killWorker(index, said) {
  said.textContent = "";
  try {
    const reply = await ask(`kill/${index}`, {method: "POST", headers: {"X-Farsight-Demo": TOKEN}});
    const body = await reply.json();
    said.textContent = reply.ok ? `process ${body.pid} got SIGKILL` : body.error.message;
  } catch (error) {
    said.textContent = reasonOf(error);
  }
}

function moveBy(index, event) {
  const steps = {ArrowDown: 1, ArrowUp: -1};
  if (event.key === "Enter" && picked) showPicked();
  if (!(event.key in steps)) return;
  event.preventDefault();
  const from = picked && picked.side === index ? picked.lane : -1;
  picked = {side: index, lane: Math.min(Math.max(from + steps[event.key], 0), view.kinds.length - 1)};
  draw();
}

function pick(side, lane) {
  if (!view || lane < 0 || lane >= view.kinds.length) return;
  picked = {side, lane};
  draw();
  showPicked();
}

async function showPicked() {
  const {side, lane} = picked;
  const host = byId("explanation");
  const name = `${view.kinds[lane] || "request"} ${lane} under ${view.sides[side].preset}`;
  try {
    const reply = await ask(`explain/${side}/${lane}`);
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error.message);
    const inside = make("div");
    drawExplanation(inside, body);
    host.replaceChildren(make("p", "note", name), inside);
  } catch (error) {
    host.replaceChildren(make("p", "note", `${name}: ${reasonOf(error)}`));
  }
}

function laneRects(row, number, kind, at, now) {
  const [due, first, last, ended, pauses] = row;
  if (due > now) return [];
  const bar = (name, from, to) => svg("rect", {class: name, x: at(from), y: number + 0.1, width: Math.max(at(to) - at(from), 0.8), height: 0.8});
  const made = [bar("wait", due, first ?? (ended ? due : now))];
  if (first !== null) made.push(bar(kind, first, ended ? last : Math.max(last, now - 0.3)));
  for (const [from, to] of pauses) made.push(bar("pause", from, to));
  if (ended && first === null) made.push(bar("lost", due, now));
  return made;
}

function drawSide(side, index, horizon, now) {
  const host = byId(`side-${index}`);
  setText(host.querySelector("h2"), side.preset);
  const set = (name, text) => setText(host.querySelector(`[data-value="${name}"]`), text);
  set("mean", side.mean_s === null ? "–" : seconds(side.mean_s));
  set("p99", side.p99_s === null ? "–" : seconds(side.p99_s));
  set("ended", `${side.ended}/${view.kinds.length}`);
  set("open", whole(side.open));
  const drawing = host.querySelector("svg");
  const at = (instant) => WIDTH * instant / horizon;
  const colour = (lane) => KINDS.indexOf(view.kinds[lane]) % 2 ? "report" : "chat";
  drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${view.kinds.length}`);
  drawing.setAttribute("aria-label", `Requests under ${side.preset}: ${side.ended} of ${view.kinds.length} ended, ${counted(side.broken, "broken stream")}`);
  const rects = side.lanes.flatMap((row, number) => laneRects(row, number, colour(number), at, now));
  const upright = (name, instant) => svg("line", {class: name, x1: at(instant), x2: at(instant), y1: 0, y2: view.kinds.length, "vector-effect": "non-scaling-stroke"});
  if (!view.over) rects.push(upright("now", now));
  for (const instant of side.kills) rects.push(upright("kill", instant));
  if (picked && picked.side === index) {
    rects.push(svg("rect", {class: "chosen", x: 0, y: picked.lane, width: WIDTH, height: 1, "vector-effect": "non-scaling-stroke"}));
  }
  drawing.replaceChildren(...rects);
}

let KINDS = [];

function draw() {
  KINDS = [...new Set(view.kinds)].sort();
  setText(byId("stage"), view.stage);
  const broken = view.sides.reduce((sum, side) => sum + side.broken, 0);
  setText(byId("broken"), whole(broken));
  byId("streams").className = `figure ${broken ? "broken" : "whole"}`;
  setText(byId("ratio"), view.ratio === null ? "–" : view.ratio.toFixed(2));
  setText(byId("ratio-of"), `mean completion, ${view.sides[1].preset} / ${view.sides[0].preset}, ${counted(view.paired, "request")} ended at both`);
  setText(byId("simulated"), view.simulated === null ? "–" : view.simulated.toFixed(2));
  const now = view.elapsed_s ?? 0;
  setText(byId("elapsed"), now > 0 ? `${now.toFixed(0)} s` : "–");
  const ends = view.sides.flatMap((side) => side.lanes.map((row) => row[2] ?? row[0]));
  const last = Math.max(0, ...ends);
  const horizon = Math.max(LEAST_S, view.over ? last : Math.max(now, ...view.sides[0].lanes.map((row) => row[0])) * 1.05);
  view.sides.forEach((side, index) => drawSide(side, index, horizon, view.over ? last : now));
}

function drawLegend() {
  const of = (name, tone) => {
    const mark = make("i");
    mark.style.setProperty("--tone", tone);
    return make("span", "", mark, name);
  };
  const tones = ["var(--line-1)", "var(--line-3)"];
  const kinds = KINDS.length > 1 && KINDS.length < 4 ? KINDS.map((kind, index) => of(`${kind}, answering`, tones[index % 2])) : [of("answering", tones[0])];
  byId("legend").replaceChildren(of("waiting", "#c9a13b"), ...kinds, of("paused", "#8f98a6"), of("worker killed", "var(--bad)"));
}

buildSide(0);
buildSide(1);
repeat(async () => {
  if (view?.over && view.simulated !== null) return;
  const reply = await ask("race");
  if (!reply.ok) throw new Error(`the demo answered ${reply.status}`);
  const isFirst = view === null;
  view = await reply.json();
  draw();
  if (isFirst) drawLegend();
}, LOOK_MS, inBanner("The race"));
