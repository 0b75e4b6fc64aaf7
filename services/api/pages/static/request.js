// One request: its figures, its timeline while it runs and long after, and what it would have taken otherwise.
const WHAT_IF_MS = 20000;  // it costs the server up to a second of work, so it is asked for by a button alone
const ENDS = {abort: ["abandoned", "warn"], error: ["failed", "bad"], stop: ["ended", "ok"], length: ["ended at its limit", "ok"]};
let over = false;

const factsOf = (choice, kind) => choice.decisions.find((each) => each.kind === kind)?.facts ?? {};
const known = (value, show) => typeof value === "number" ? show(value) : null;

function forecastText(choice) {
  const {mean_tokens: mean, q90_tokens: late} = factsOf(choice, "forecast"), predicted = mean ?? choice.summary.predicted_tokens;
  if (typeof predicted !== "number") return null;
  return `${counted(predicted, "token")}${typeof late === "number" ? `, 9 of 10 within ${whole(late)}` : ""}`;
}

function promiseText(choice) {
  const {p50_s: median, p90_s: late} = factsOf(choice, "promised");
  return typeof median === "number" ? `${seconds(median)}, 9 of 10 within ${seconds(late)}` : null;
}

// [label, text] of a choice; figures that are not known are left out.
function figuresOf(choice, received_at) {
  const {summary} = choice, received = factsOf(choice, "received");
  const date = new Date(1000 * received_at);
  return [
    ["Received", received_at ? `${date.toLocaleDateString()} ${clock(date)}` : null],
    ["Tenant", received.tenant ?? null],
    ["Prompt", known(received.prompt_tokens, (value) => counted(value, "token"))],
    ["Time to first token", known(summary.ttft_s, seconds)],
    [choice.status === "running" ? "Running for" : "Took", known(summary.jct_s ?? choice.age_s, seconds)],
    ["Waited", known(summary.waited_s, seconds)],
    ["Output", counted(choice.output_tokens, "token")],
    ["Forecast", forecastText(choice)],
    ["Promised end", promiseText(choice)],
    ["Now", choice.status === "running" ? endText(choice.eta_p50, choice.eta_p90) || null : null],
    ["Outcome", choice.status === "running" ? choice.state : ENDS[summary.finish_reason]?.[0] ?? summary.finish_reason],
    ["Replica", summary.replica],
    ["Preempted", summary.num_preemptions ? counted(summary.num_preemptions, "time") : null],
    ["Resumed", summary.num_resumptions ? counted(summary.num_resumptions, "time") : null],
  ].filter(([, text]) => text !== null && text !== undefined);
}

function drawRequest(explanation) {
  const {choices, received_at} = explanation, several = choices.length > 1;
  over = choices.every((choice) => choice.status === "ended");
  byId("sums").replaceChildren(...choices.flatMap((choice) => figuresOf(choice, received_at).map(([label, text]) =>
    make("div", "", make("dt", "", several ? `${label}, choice ${choice.index}` : label), make("dd", "", text)))));
  const [text, level] = over ? ENDS[choices[0].summary.finish_reason] ?? [choices[0].summary.finish_reason ?? "ended", "ok"] : [choices[0].state ?? "running", "warn"];
  setText(byId("outcome"), text);
  byId("outcome").dataset.level = level;
  for (const id of ["sums-panel", "detail", "outcome"]) byId(id).hidden = false;
  byId("what-if").hidden = !over;
  drawExplanation(byId("explanation"), explanation);
}

async function showRequest() {
  if (over) return;
  try {
    drawRequest(await getJson(`live/requests/${encodeURIComponent(ID)}`));
    byId("problem").hidden = true;
  } catch (error) {
    setText(byId("problem"), reasonOf(error));
    byId("problem").hidden = false;
  }
}

byId("what-if").addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = byId("what-if-answer"), button = byId("what-if").querySelector("button");
  const asked = [...new FormData(event.target)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
  if (!asked.length) return setText(said, "Change at least one of preset, replicas and priority.");
  button.disabled = true;
  setText(said, "Simulating …");
  try {
    const reply = await ask(`${ROOT}v1/requests/${encodeURIComponent(ID)}/what-if?${new URLSearchParams(asked)}`, WHAT_IF_MS);
    const body = await reply.json();
    setText(said, reply.ok ? body.text : body.error?.message ?? `the server answered ${reply.status}`);
  } catch (error) {
    setText(said, reasonOf(error));
  }
  button.disabled = false;
});

setText(byId("id"), ID);
document.title = `Farsight: ${ID}`;
repeat(showRequest, 1000, () => {});
