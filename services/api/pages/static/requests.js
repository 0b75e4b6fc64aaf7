// Requests in flight and those that ended last, each with a page of its own.
const RESPONSE_ID = /^(chatcmpl|cmpl)-[0-9a-f]{32}$/;
const OUTCOMES = {abort: "abandoned", error: "failed", stop: "ended", length: "ended at its limit"};

const shortId = (id) => id.length > 20 ? `${id.slice(0, 17)}…` : id;

function named(text, whole_text) {
  const made = make("span", "name", text || "–");
  made.title = whole_text;
  return made;
}

function lengthCell(row) {
  const expected = row.predicted_len ?? (row.live ? row.max_new_tokens : null);
  if (expected === null) return whole(row.output_len);
  const fill = make("span"), long = Math.max(expected, row.output_len);
  fill.style.width = `${long ? Math.min(100, 100 * row.output_len / long) : 0}%`;
  const text = row.predicted_len === null ? `${whole(row.output_len)}, limit ${whole(row.max_new_tokens)}` : `${whole(row.output_len)} of ${whole(row.predicted_len)}`;
  const cell = make("span", "length", make("span", "track", fill), text);
  if (row.most_len !== null) cell.title = `forecast: mean ${whole(row.predicted_len)}, nine of ten at most ${whole(row.most_len)}`;
  return cell;
}

function stateCell(row) {
  const cell = make("span", `state ${STATES.includes(row.state) ? row.state : ""}`, row.state);
  if (row.reason === "error" || row.reason === "abort") cell.dataset.level = row.reason === "error" ? "bad" : "warn";
  if (row.waits_for) cell.title = `waits for: ${row.waits_for}`;
  return cell;
}

function promptText(row) {
  const done = row.prefilled_len ?? 0;
  return done > 0 && done < row.prompt_len ? `${whole(done)} of ${whole(row.prompt_len)}` : whole(row.prompt_len);
}

const rankText = (row) => row.level ? `level ${row.level}` : typeof row.rank_s === "number" ? seconds(row.rank_s) : "–";
const endsText = (row) => !row.live ? seconds(row.took_s) : typeof row.eta_p50 === "number" ? `in ${seconds(row.eta_p50)}` : "–";

const COLUMNS = [
  {name: "request", label: "Request", about: "Id of the answer; leads to its page.", of: (row) => row.response_id || row.request_id, show: (row) => named(shortId(row.response_id || row.request_id), row.response_id)},
  {name: "at", label: "At", about: "When it reached its replica, by this computer's clock.", of: (row) => row.at, show: (row) => make("time", "", clock(row.at))},
  {name: "state", label: "State", about: "waiting, prefill, decode, paused (others go first, or the client does not read) or offloaded to host memory; or how it ended.", of: (row) => row.live ? STATES.indexOf(row.state) : 100, show: stateCell},
  {name: "tenant", has: (row) => row.tenant, label: "Tenant", about: "Whose key it was sent with.", of: (row) => row.tenant, show: (row) => named(row.tenant, row.tenant)},
  {name: "prompt", label: "Prompt", number: true, about: "Prompt tokens; while they are computed, how many are done of how many.", of: (row) => row.prompt_len, show: promptText},
  {name: "output", label: "Output of forecast", about: "Tokens generated, of the number that was predicted, or of its limit where there is no forecast.", of: (row) => row.output_len, show: lengthCell},
  {name: "ttft", label: "First token", number: true, about: "From its arrival at the replica to its first token.", of: (row) => row.ttft_s ?? Infinity, show: (row) => typeof row.ttft_s === "number" ? seconds(row.ttft_s) : "–"},
  {name: "end", label: "Ends", number: true, about: "In flight: the median of the time until it ends. Ended: what it took on the replica.", of: (row) => row.live ? row.eta_p50 ?? Infinity : row.took_s, show: endsText},
  {name: "rank", has: (row) => rankText(row) !== "–", label: "Level or rank", number: true, about: "Its queue of the MLFQ, or its rank where the order ranks by time; lower goes first.", of: (row) => row.level || (row.rank_s ?? Infinity), show: rankText},
  {name: "kv", has: (row) => row.kv_tokens, label: "KV", number: true, about: "Tokens whose KV is on the device.", of: (row) => row.kv_tokens ?? 0, show: (row) => row.live ? whole(row.kv_tokens) : "–"},
  {name: "replica", label: "Replica", about: "The replica that it is on.", of: (row) => row.replica, show: (row) => row.replica},
];

const list = new RowTable(byId("requests"), {
  columns: COLUMNS, sort: "at", descending: true,
  key: (row) => `${row.response_id || row.request_id}/${row.choice}`,
  link: (row) => row.response_id ? `${ROOT}dashboard/requests/${encodeURIComponent(row.response_id)}` : "",
  searchLabel: "Search: id, tenant, state, replica",
  search: (row) => [row.response_id, row.request_id, row.tenant, row.state, row.reason, row.replica].join(" "),
  choices: {
    is: {label: "In flight and ended", of: (row) => row.live ? "in flight" : OUTCOMES[row.reason] ?? row.reason},
    tenant: {label: "All tenants", of: (row) => row.tenant},
    replica: {label: "All replicas", of: (row) => row.replica},
  },
  drawn: (shown, all) => {
    byId("none").hidden = shown > 0;
    byId("requests").hidden = !shown;
    setText(byId("none"), all ? "None of them matches." : "No request yet.");
  },
});

function takeRequests(view) {
  const now_ms = Date.now();
  const live = view.replicas.flatMap((replica) => replica.requests.map((row) => ({...row, live: true, at: now_ms - 1000 * row.age_s, replica: replica.replica})));
  const over = (row, replica) => ({...row, state: OUTCOMES[row.reason] ?? row.reason, at: now_ms - 1000 * (row.ago_s + row.took_s), replica});
  const ended = [...view.left_waiting.map((row) => over(row, "–")), ...view.replicas.flatMap((replica) => replica.ended.map((row) => over(row, replica.replica)))];
  const sum = (name) => view.replicas.reduce((all, replica) => all + replica[name], 0);
  setText(byId("sums"), `${sum("num_running")} running, ${sum("num_waiting") + view.num_unplaced} waiting, ${sum("num_offloaded")} offloaded on ${counted(view.replicas.length, "replica")}; ${counted(ended.length, "request")} ended lately`);
  list.take([...live, ...ended]);
}

byId("find").append(...list.controls());
// Any answer's id leads to its page, as far as the log goes back.
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = list.chosen.q.trim();
  if (RESPONSE_ID.test(id)) location.assign(`${ROOT}dashboard/requests/${id}`);
});
follow({requests: takeRequests});
