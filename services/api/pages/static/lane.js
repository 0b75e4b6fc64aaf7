// The timeline of one request: a lane of the states that it was in, and its decisions with their sentences and numbers.
const STATES = ["waiting", "prefill", "decode", "paused", "offloaded", "moved"];
const SVG = "http://www.w3.org/2000/svg";

// The state that a request is in after a decision of that kind; null where the decision does not change it.
function stateAfter(kind, before, hasToken) {
  const running = hasToken ? "decode" : "prefill";
  switch (kind) {
    case "received": case "placed": case "arrived": case "waits": case "returned": case "batch_broken": return "waiting";
    case "admitted": case "started": case "sent": return "prefill";
    case "first_token": return "decode";
    case "uploaded": case "continues": case "client_reads": return running;
    case "paused": case "client_slow": return "paused";
    case "offloaded": return "offloaded";
    case "preempted": case "host_full": return "waiting";
    case "resumed": case "worker_lost": case "superseded": return "moved";
    default: return null;
  }
}

// [{state, from, to}] in seconds since the request arrived, without those of no length.
function lanesOf(decisions, end) {
  const lanes = [];
  let state = "waiting", from = 0, hasToken = false;
  for (const {kind, at_s: at} of decisions) {
    if (kind === "finished" || kind === "answered" || kind === "refused") continue;
    hasToken ||= kind === "first_token";
    const next = stateAfter(kind, state, hasToken);
    if (next === null || next === state) continue;
    if (at > from) lanes.push({state, from, to: at});
    [state, from] = [next, Math.max(at, from)];
  }
  if (end > from) lanes.push({state, from, to: end});
  return lanes;
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function drawLane(choice, now_s) {
  const last = choice.decisions.length ? choice.decisions[choice.decisions.length - 1].at_s : 0;
  const end = Math.max(choice.status === "running" ? now_s : last, last, 1e-6);
  const lanes = lanesOf(choice.decisions, end);
  const drawing = svg("svg", {class: "lane", viewBox: "0 0 1000 34", preserveAspectRatio: "none", role: "img"});
  const at = (seconds) => 1000 * seconds / end;
  for (const lane of lanes) {
    const rect = svg("rect", {class: lane.state, x: at(lane.from), y: 6, width: Math.max(at(lane.to) - at(lane.from), 1), height: 22});
    const title = svg("title", {});
    title.textContent = `${lane.state}: ${seconds(lane.to - lane.from)}`;
    rect.append(title);
    drawing.append(rect);
  }
  for (const each of choice.decisions) {
    drawing.append(svg("line", {x1: at(each.at_s), x2: at(each.at_s), y1: 2, y2: 32, "vector-effect": "non-scaling-stroke"}));
  }
  const sums = STATES.map((state) => [state, lanes.filter((lane) => lane.state === state).reduce((sum, lane) => sum + lane.to - lane.from, 0)]);
  const seen = sums.filter(([, length]) => length > 0);
  drawing.setAttribute("aria-label", `${seconds(end)} in all: ${seen.map(([state, length]) => `${state} ${seconds(length)}`).join(", ")}`);
  const legend = make("div", "legend", ...seen.map(([state, length]) => make("span", state, make("i"), `${state} ${seconds(length)}`)));
  return [drawing, make("div", "lane-scale", make("span", "", "0"), make("span", "", seconds(end))), legend];
}

function decisionRow(each) {
  const what = make("div", "what", each.text);
  const facts = Object.entries(each.facts);
  if (facts.length) {
    const numbers = make("div", "facts", ...facts.map(([name, value]) => make("span", "", `${name} = ${typeof value === "number" ? Number(value.toPrecision(5)) : value}`)));
    what.append(make("details", "", make("summary", "", "numbers"), numbers));
  }
  return make("li", "", make("span", "at", seconds(each.at_s)), make("span", "by", each.by), what);
}

// All of one explanation. What was opened stays open when it is drawn again.
function drawExplanation(host, explanation) {
  const open = new Set([...host.querySelectorAll("details[open]")].map((each) => each.closest("li").dataset.number));
  const now_s = Date.now() / 1000 - explanation.received_at;
  const parts = explanation.choices.flatMap((choice) => {
    const head = explanation.choices.length > 1 ? [make("h3", "", `Choice ${choice.index}`)] : [];
    const list = make("ol", "decisions", ...choice.decisions.map(decisionRow));
    [...list.children].forEach((row, index) => {
      row.dataset.number = `${choice.index}/${index}`;
      if (open.has(row.dataset.number)) row.querySelector("details").open = true;
    });
    const left = choice.num_left_out ? [make("p", "note", `Dropped from the trace: ${counted(choice.num_left_out, "decision")}.`)] : [];
    return [...head, ...drawLane(choice, now_s), list, ...left];
  });
  host.replaceChildren(...parts);
}

// When a request that runs will have ended, of the seconds that the server predicts; empty without them.
function endText(median, late) {
  if (typeof median !== "number") return "";
  return `ends in ${seconds(median)}${typeof late === "number" ? ` (9 of 10 times within ${seconds(late)})` : ""}`;
}
