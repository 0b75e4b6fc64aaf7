// The live table and the timeline of the chosen request.
const COLUMNS = [
  {name: "request", label: "Request", about: "Id of the answer; opens its timeline.", of: (row) => row.response_id || row.request_id},
  {name: "tenant", label: "Tenant", about: "Whose key it was sent with.", of: (row) => row.tenant},
  {name: "state", label: "State", about: "waiting, prefill, decode, paused (others go first, or the client does not read) or offloaded to host memory.", of: (row) => STATES.indexOf(row.state)},
  {name: "age", label: "Age", number: true, about: "Since it reached the scheduler of its replica.", of: (row) => row.age_s},
  {name: "output", label: "Output of forecast", about: "Tokens generated of the predicted number, or of its limit where there is no forecast.", of: (row) => row.output_len},
  {name: "end", label: "Predicted end", number: true, about: "Median of the time until it ends.", of: (row) => row.eta_p50 ?? Infinity},
  {name: "rank", label: "Level or rank", number: true, about: "Its queue of the MLFQ, or its rank where the order ranks by time; lower goes first.", of: (row) => row.level || (row.rank_s ?? Infinity)},
  {name: "prompt", label: "Prompt", number: true, about: "Prompt tokens; while they are computed, how many are done of how many.", of: (row) => row.prompt_len},
  {name: "kv", label: "KV", number: true, about: "Tokens whose KV is on the device.", of: (row) => row.kv_tokens},
  {name: "drops", label: "Preempted", number: true, about: "How often its KV was dropped.", of: (row) => row.num_preemptions},
  {name: "replica", label: "Replica", about: "The replica that it is on.", of: (row) => row.replica},
];
const MAX_ENDED = 15;
let sortBy = COLUMNS[3], descending = true, rows = [], chosen = null, explained = null;

function drawHeads() {
  byId("live").tHead.rows[0].replaceChildren(...COLUMNS.map((column) => {
    const button = make("button", "", column.label);
    button.type = "button";
    button.title = column.about;
    button.addEventListener("click", () => {
      descending = sortBy === column ? !descending : false;
      sortBy = column;
      drawHeads();
      drawRows();
      byId("live").querySelector(`[data-column="${column.name}"] button`).focus();
    });
    const head = make("th", column.number ? "number" : "", button);
    head.dataset.column = column.name;
    if (column === sortBy) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    return head;
  }));
}

function compare(a, b) {
  const [left, right] = [sortBy.of(a), sortBy.of(b)];
  const order = typeof left === "string" ? natural(left, right) : left === right ? 0 : left - right;
  return (descending ? -order : order) || natural(a.request_id, b.request_id);
}

function lengthCell(row) {
  const whole_len = Math.max(row.predicted_len ?? row.max_new_tokens, row.output_len);
  const fill = make("span");
  fill.style.width = `${whole_len ? Math.min(100, 100 * row.output_len / whole_len) : 0}%`;
  const text = row.predicted_len === null ? `${whole(row.output_len)}, limit ${whole(row.max_new_tokens)}` : `${whole(row.output_len)} of ${whole(row.predicted_len)}`;
  const cell = make("span", "length", make("span", "track", fill), text);
  if (row.most_len !== null) cell.title = `90th percentile ${whole(row.most_len)}, limit ${whole(row.max_new_tokens)}`;
  return cell;
}

function stateCell(row) {
  const cell = make("span", `state ${STATES.includes(row.state) ? row.state : ""}`, row.state);
  if (row.waits_for) cell.title = `waits for: ${row.waits_for}`;
  return cell;
}

const shortId = (id) => id.length > 20 ? `${id.slice(0, 16)}…` : id;

function idButton(id) {
  const button = make("button", "link", shortId(id));
  button.type = "button";
  button.title = id;
  return button;
}

function rankText(row) {
  if (row.level) return `level ${row.level}`;
  return row.rank_s === null ? "" : seconds(row.rank_s);
}

function promptText(row) {
  const done = row.prefilled_len;
  return done > 0 && done < row.prompt_len ? `${whole(done)} of ${whole(row.prompt_len)}` : whole(row.prompt_len);
}

function liveRow(row) {
  const id = row.response_id;
  const name = id ? idButton(id) : document.createTextNode(shortId(row.request_id));
  const tenant = make("span", "tenant", row.tenant || "–");
  tenant.title = row.tenant;
  const cells = [name, tenant, stateCell(row), seconds(row.age_s), lengthCell(row),
    typeof row.eta_p50 === "number" ? seconds(row.eta_p50) : "–", rankText(row) || "–", promptText(row), whole(row.kv_tokens), whole(row.num_preemptions), row.replica];
  return tableRow(id, cells.map((content, index) => make("td", COLUMNS[index].number ? "number" : "", content)));
}

function tableRow(id, cells) {
  const line = make("tr", "", ...cells);
  line.dataset.id = id;
  if (id && id === chosen) line.setAttribute("aria-selected", "true");
  return line;
}

// A table is drawn again once a second: the keyboard's place in it is kept.
function replaceRows(table, lines) {
  const focused = table.contains(document.activeElement) ? document.activeElement.closest("tr")?.dataset.id : null;
  table.tBodies[0].replaceChildren(...lines);
  if (focused) [...table.tBodies[0].rows].find((line) => line.dataset.id === focused)?.querySelector("button")?.focus();
}

function drawRows() {
  replaceRows(byId("live"), [...rows].sort(compare).map(liveRow));
  byId("none").hidden = rows.length > 0;
  byId("live").hidden = !rows.length;
}

function drawEnded(view) {
  const left = view.left_waiting.map((each) => ({...each, replica: "–"}));
  const ended = [...left, ...view.replicas.flatMap((replica) => replica.ended.map((each) => ({...each, replica: replica.replica})))].sort((a, b) => a.ago_s - b.ago_s);
  replaceRows(byId("ended"), ended.slice(0, MAX_ENDED).map((each) => tableRow(each.response_id, [
    make("td", "", idButton(each.response_id)), make("td", "", each.reason === "abort" ? "abandoned" : each.reason), make("td", "number", whole(each.output_len)),
    make("td", "number", each.predicted_len === null ? "–" : whole(each.predicted_len)), make("td", "number", seconds(each.took_s)), make("td", "", each.replica)])));
}

async function drawView(view) {
  rows = view.replicas.flatMap((replica) => replica.requests.map((row) => ({...row, replica: replica.replica})));
  const sum = (name) => view.replicas.reduce((total, replica) => total + replica[name], 0);
  setText(byId("sums"), `${sum("num_running")} running, ${sum("num_waiting") + view.num_unplaced} waiting, ${sum("num_offloaded")} offloaded on ${counted(view.replicas.length, "replica")}`);
  drawRows();
  drawEnded(view);
  if (chosen !== null && explained !== "ended") await showChosen();
}

async function showChosen() {
  const id = chosen;
  let content, state = "running";
  try {
    const explanation = await getJson(`live/requests/${encodeURIComponent(id)}`);
    state = explanation.choices.every((choice) => choice.status === "ended") ? "ended" : "running";
    content = (host) => drawExplanation(host, explanation);
  } catch (error) {
    content = (host) => host.replaceChildren(make("p", "note", reasonOf(error)));
  }
  if (id !== chosen) return;
  explained = state;
  content(byId("explanation"));
}

function choose(id) {
  chosen = id;
  explained = null;
  byId("detail").hidden = id === null;
  drawRows();
  if (id === null) return;
  const close = make("button", "", "Close");
  close.type = "button";
  close.addEventListener("click", () => choose(null));
  const body = make("div");
  body.id = "explanation";
  byId("detail").replaceChildren(make("div", "head", make("h2", "", id), close), body, ...whatIfForm(id));
  byId("detail").scrollIntoView({block: "nearest"});
  showChosen();
}

for (const table of ["live", "ended"]) {
  byId(table).addEventListener("click", (event) => {
    const id = event.target.closest("tbody tr")?.dataset.id;
    if (id) choose(id);
  });
}
drawHeads();
follow({requests: drawView});
