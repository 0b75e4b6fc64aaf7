// Conversations, by what their turns have cost, and the applications that they come from.
function named(text) {
  const made = make("span", "name", text || "–");
  made.title = text;
  return made;
}

const count = (name, label, about) => ({name, label, about, number: true, of: (row) => row.counts[name], show: (row) => amount(row.counts[name])});
const time = (name, label, about) => ({name, label, about, number: true, of: (row) => row.counts[name], show: (row) => seconds(row.counts[name])});
const SUMS = [
  count("turns", "Turns", "Requests that have begun."),
  count("prompt_tokens", "Prompt", "Prompt tokens of all answered turns."),
  count("new_tokens", "New", "Tokens behind what an earlier prompt of the session had."),
  count("computed_tokens", "Computed", "Prompt tokens that were computed, for the first time or again."),
  count("restored_tokens", "Brought back", "Prompt tokens that came back from the host or from disk."),
  count("output_tokens", "Output", "Tokens generated."),
  time("in_model_s", "In the model", "Time with a request open."),
  time("away_s", "Away", "Time between an answer and the next turn: in tools, or with people."),
  time("gpu_s", "GPU time", "Its share of the steps: what it has cost."),
];

function stateCell(row) {
  const made = make("span", "state", row.num_open ? "in the model" : "away");
  if (row.num_open) made.dataset.level = "ok";
  if (row.num_open > 1) made.title = `${row.num_open} requests`;
  return made;
}

const list = new RowTable(byId("sessions"), {
  columns: [
    {name: "session", label: "Session", about: "As its client named it; #7 where it was found by its prompts.", of: (row) => row.name, show: (row) => named(row.name)},
    {name: "application", has: (row) => row.application, label: "Application", about: "What its requests say that they come from.", of: (row) => row.application, show: (row) => named(row.application)},
    {name: "tenant", has: (row) => row.tenant, label: "Tenant", about: "Whose key it was sent with.", of: (row) => row.tenant, show: (row) => named(row.tenant)},
    {name: "state", label: "State", about: "Whether a request is open now.", of: (row) => -row.num_open, show: stateCell},
    {name: "latest", label: "Latest", number: true, about: "Time since its latest event.", of: (row) => row.ago_s, show: (row) => seconds(row.ago_s)},
    ...SUMS,
  ],
  sort: "latest", descending: false,
  key: (row) => `${row.tenant}/${row.is_named}/${row.name}`,
  link: () => "",
  searchLabel: "Search: session, application, tenant",
  search: (row) => [row.name, row.application, row.tenant].join(" "),
  choices: {
    application: {label: "All applications", of: (row) => row.application},
    tenant: {label: "All tenants", of: (row) => row.tenant},
  },
  drawn: (shown, all) => {
    byId("none").hidden = shown > 0;
    byId("sessions").hidden = !shown;
    setText(byId("none"), all ? "None of them matches." : "No request yet.");
  },
});

const applications = new RowTable(byId("applications"), {
  columns: [
    {name: "application", label: "Application", about: "What requests say that they come from.", of: (row) => row.application, show: (row) => named(row.application || "(not said)")},
    count("sessions", "Sessions", "Sessions that have begun."),
    ...SUMS,
  ],
  sort: "turns", descending: true,
  key: (row) => row.application,
  link: () => "",
  searchLabel: "", search: () => "", choices: {}, drawn: () => {},
});

function takeSessions(view) {
  list.take(view.rows.map((row) => ({...row, ago_s: Math.max(0, view.now - row.last_at)})));
  applications.take(view.applications);
  const open = view.rows.filter((row) => row.num_open).length;
  const forgotten = view.num_forgotten ? `; ${whole(view.num_forgotten)} forgotten` : "";
  setText(byId("sums"), `${counted(view.num_sessions, "session")}, ${whole(open)} in the model${forgotten}`);
}

byId("find").append(...list.controls());
follow({sessions: takeSessions});
