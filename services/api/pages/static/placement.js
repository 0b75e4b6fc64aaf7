// Where requests go: loads of the replicas, reasons, the prefix tree.
function cell(content, className = "") {
  const made = document.createElement("td");
  made.append(content);
  made.className = className;
  return made;
}

function line(...cells) {
  const made = document.createElement("tr");
  made.append(...cells);
  return made;
}

// A bar of two parts, each drawn as a share of `most`; the second is fainter.
function bar(parts, most) {
  const track = document.createElement("div");
  track.className = "bar";
  parts.forEach((part, index) => {
    const filled = document.createElement("span");
    filled.style.width = `${most > 0 ? 100 * part / most : 0}%`;
    if (index) filled.className = "second";
    track.append(filled);
  });
  return track;
}

function drawReplicas(replicas, byPrefixes) {
  const most = Math.max(0, ...replicas.map((each) => each.prefill_s + each.decode_s));
  for (const head of byId("replicas").querySelectorAll(".load, .cached")) head.hidden = !byPrefixes;
  byId("replicas").tBodies[0].replaceChildren(...replicas.map((each) => {
    const name = each.takes_requests ? each.replica : `${each.replica} (accepts no requests)`;
    const cells = [cell(name, each.takes_requests ? "" : "away"), cell(whole(each.num_requests)), cell(whole(each.work_tokens))];
    if (byPrefixes) {
      const cached = `${whole(each.cached_tokens)} of ${whole(each.capacity_tokens)}`;
      cells.push(cell(`${(each.prefill_s + each.decode_s).toFixed(1)} s`), cell(bar([each.prefill_s, each.decode_s], most)), cell(cached));
    }
    return line(...cells);
  }));
}

function drawReasons(reasons) {
  const all = reasons.reduce((sum, each) => sum + each.count, 0);
  byId("reasons").tBodies[0].replaceChildren(...reasons.map((each) =>
    line(cell(each.reason), cell(whole(each.count)), cell(bar([each.count], all)))));
}

function drawPrefixes(prefixes, names) {
  byId("tree").hidden = !prefixes.length;
  const heads = ["Prefix, tokens", "up to", "requests", "in flight", ...names].map((text, index) => {
    const head = document.createElement("th");
    head.textContent = text;
    if (index > 3) head.className = "cell";
    return head;
  });
  byId("prefixes").tHead.replaceChildren(line(...heads));
  byId("prefixes").tBodies[0].replaceChildren(...prefixes.map((each) => {
    const first = cell(whole(each.num_tokens));
    first.style.paddingLeft = `${16 * Math.min(each.depth, 10)}px`;
    const cells = [first, cell(whole(each.end_len)), cell(whole(each.num_recent)), cell(whole(each.num_in_flight))];
    return line(...cells, ...names.map((name) => cell(mark(each, name), "cell")));
  }));
}

function mark(prefix, name) {
  const made = document.createElement("i");
  made.className = prefix.replicas.includes(name) ? "cached" : prefix.assigned.includes(name) ? "assigned" : "";
  made.title = made.className ? `${name}: ${made.className}` : name;
  return made;
}

function drawRecent(recent) {
  byId("recent").tBodies[0].replaceChildren(...recent.map((each) =>
    line(cell(clock(1000 * each.placed_at)), cell(each.replica, "text"), cell(each.reason, "text"), cell(whole(each.known_len)), cell(whole(each.hit_len)))));
}

function drawView(view) {
  const replicas = [...view.replicas].sort((a, b) => natural(a.replica, b.replica));
  const used = new Set(view.prefixes.flatMap((each) => [...each.replicas, ...each.assigned]));
  byId("policy").textContent = view.placement;
  drawReplicas(replicas, view.by_prefixes);
  drawReasons(view.reasons);
  drawIcicle(view.prefixes, replicas.map((each) => each.replica));
  drawPrefixes(view.prefixes, replicas.map((each) => each.replica).filter((name) => used.has(name)));
  drawRecent(view.recent);
}

// The loads over time: a chart for each column, a line for each replica.
const LOADS = [
  {column: "requests", title: "Requests", about: "Requests that are on the replica.", show: amount, top: 4},
  {column: "work_tokens", title: "Work, tokens", about: "Tokens of prompt and expected output of the requests there.", show: whole, top: 100},
  {column: "waiting", title: "Waiting there", about: "Requests on the replica that wait for a place in its batch.", show: amount, top: 4},
  {column: "kv_used", title: "KV memory in use", about: "Share of its KV pool.", show: percent, top: 1},
];
const tables = {second: new History("second", ["lines"]), minute: new History("minute", ["lines"])};
const grid = new LineGrid(byId("loads"), () => tables[ranges.step], () => ranges.span_s, (replica) => `replica ${replica}`);
const ranges = new RangeButtons(() => {
  grid.draw(LOADS);
  askAgain();
});

function drawLoads(more) {
  tables[ranges.step].take(flat(more));
  setText(byId("left-out"), more.num_left_out ? `Not drawn: ${counted(more.num_left_out, "more replica")}.` : "");
  grid.draw(LOADS);
}

const askAgain = follow({placement: drawView, replicas: drawLoads}, {query: () => tables[ranges.step].query, wants: (part) => part !== "replicas" || ranges.due(tables[ranges.step])});
