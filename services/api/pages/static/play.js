// Sends requests to the served model as any client does, and draws when each token came.
const COPIES = 20;
const EXAMPLES = ["Once upon a time", "Write one sentence about the sea.", "Count from one to ten."];
let model = null, running = null;

async function readModel() {
  if (model !== null) return;
  const [found] = (await getJson("v1/models")).data;
  model = found;
  setText(byId("model"), `${found.id} · ${whole(found.max_model_len)} tokens${found.emulated ? ` · emulated (${found.emulated}): answers are made up` : ""}`);
  const examples = Array.isArray(found.examples) && found.examples.length ? found.examples : EXAMPLES;
  byId("examples").replaceChildren(...examples.map((text) => {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => { byId("prompt").value = text; byId("prompt").focus(); });
    return button;
  }));
  if (!byId("prompt").value) byId("prompt").value = examples[0];
}

function bodyOf() {
  const text = byId("prompt").value;
  const content = byId("kind").value === "chat" ? {messages: [{role: "user", content: text}]} : {prompt: text};
  return {model: model.id, ...content, max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value),
    priority: Number(byId("priority").value), stream: true, stream_options: {include_usage: true}};
}

// Streams one request; `heard` is called with (text, tokens so far, ms since the start). Returns {id, usage, times, ms}.
async function stream(body, address, signal, heard) {
  const beganAt = performance.now();
  const key = sessionStorage.getItem(KEY);
  const headers = {"Content-Type": "application/json", ...(key === null ? {} : {Authorization: `Bearer ${key}`})};
  const reply = await fetch(ROOT + address, {method: "POST", credentials: "omit", headers, body: JSON.stringify(body), signal});
  if (!reply.ok) {
    noteRefusal(reply.status);
    throw new Error((await reply.json()).error?.message ?? `the server answered ${reply.status}`);
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const result = {id: null, usage: null, times: [], ms: 0};
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) take(event, result, performance.now() - beganAt, heard);
  }
  result.ms = performance.now() - beganAt;
  return result;
}

function take(event, result, ms, heard) {
  const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
  if (!data || data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  result.id ??= chunk.id;
  result.usage = chunk.usage ?? result.usage;
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  if (!text) return;
  result.times.push(ms);
  heard?.(text, result.times.length, ms);
}

function noteRefusal(status) {
  if (status === 401 || status === 403) byId("key-form").hidden = false;
}

const addressOf = () => byId("kind").value === "chat" ? "v1/chat/completions" : "v1/completions";

function drawTiming(times, end_ms) {
  const drawing = svg("svg", {class: "timing", viewBox: "0 0 1000 42", preserveAspectRatio: "none", role: "img"});
  times.forEach((ms, index) => drawing.append(svg("rect", {class: index ? "" : "first", x: 1000 * ms / end_ms, y: index ? 8 : 2, width: 2, height: index ? 26 : 38})));
  drawing.setAttribute("aria-label", `${times.length} parts of the answer over ${seconds(end_ms / 1000)}`);
  byId("timing").replaceChildren(drawing, make("div", "lane-scale", make("span", "", "sent"), make("span", "", times.length ? `first token ${seconds(times[0] / 1000)}` : ""), make("span", "", seconds(end_ms / 1000))));
}

function numbersOf(result) {
  const tokens = result.usage ? `${result.usage.prompt_tokens} prompt and ${result.usage.completion_tokens} output tokens, ` : "";
  const first = result.times.length ? `first after ${seconds(result.times[0] / 1000)}, ` : "";
  return `${tokens}${first}all after ${seconds(result.ms / 1000)}`;
}

function setBusy(controller) {
  running = controller;
  for (const name of ["send", "many"]) byId(name).disabled = controller !== null;
  byId("stop").disabled = controller === null;
}

async function send() {
  if (running !== null) return;
  setBusy(new AbortController());
  const answer = byId("answer"), times = [];
  answer.replaceChildren();
  byId("explanation").replaceChildren();
  byId("numbers").classList.remove("bad");
  setText(byId("numbers"), "Waits for the first token");
  try {
    await readModel();
    const result = await stream(bodyOf(), addressOf(), running.signal, (text, count, ms) => {
      answer.append(text);
      times.push(ms);
      setText(byId("numbers"), `${count} parts, the first after ${seconds(times[0] / 1000)}`);
      if (count % 4 === 0) drawTiming(times, ms);
    });
    drawTiming(result.times, result.ms);
    setText(byId("numbers"), numbersOf(result));
    await explain(result.id);
  } catch (error) {
    byId("numbers").classList.toggle("bad", error.name !== "AbortError");
    setText(byId("numbers"), error.name === "AbortError" ? "Stopped; the server frees its memory within a step." : reasonOf(error));
  }
  setBusy(null);
}

async function explain(id) {
  try {
    drawExplanation(byId("explanation"), await getJson(`v1/requests/${encodeURIComponent(id)}`));
    setText(byId("explain-note"), id);
  } catch (error) {
    setText(byId("explain-note"), reasonOf(error));
  }
}

function runRow(index) {
  const wait = make("span", "wait"), flow = make("span", "stream");
  const text = make("span", "", "waits");
  return {node: make("div", "run", make("span", "", `${index + 1}`), make("div", "bar", wait, flow), text), wait, flow, text, first: null, last: null, end: null};
}

function drawRuns(runs, now_ms) {
  const end = Math.max(...runs.map((run) => run.end ?? now_ms), 1);
  for (const run of runs) {
    const first = run.first ?? run.end ?? now_ms;
    run.wait.style.width = `${100 * first / end}%`;
    run.flow.style.left = `${100 * first / end}%`;
    run.flow.style.width = `${100 * Math.max(0, (run.end ?? now_ms) - first) / end}%`;
  }
}

async function sendMany() {
  if (running !== null) return;
  setBusy(new AbortController());
  byId("runs-panel").hidden = false;
  const runs = Array.from({length: COPIES}, (_, index) => runRow(index));
  byId("runs").replaceChildren(...runs.map((run) => run.node));
  setText(byId("runs-note"), "Running");
  const beganAt = performance.now(), {signal} = running;
  const drawing = setInterval(() => drawRuns(runs, performance.now() - beganAt), 100);
  try {
    await readModel();
    const body = bodyOf(), address = addressOf();
    await Promise.all(runs.map(async (run) => {
      try {
        const result = await stream(body, address, signal, (text, count, ms) => { run.first ??= ms; });
        run.end = result.ms;
        setText(run.text, `${result.usage?.completion_tokens ?? result.times.length} tokens in ${seconds(result.ms / 1000)}`);
      } catch (error) {
        run.end = performance.now() - beganAt;
        run.failed = true;
        setText(run.text, error.name === "AbortError" ? "stopped" : reasonOf(error));
        run.text.title = run.text.textContent;
      }
    }));
    const done = runs.filter((run) => !run.failed).map((run) => run.end).sort((a, b) => a - b);
    const mean = done.reduce((sum, ms) => sum + ms, 0) / done.length;
    setText(byId("runs-note"), done.length ? `${done.length} of ${COPIES} answered: mean ${seconds(mean / 1000)}, fastest ${seconds(done[0] / 1000)}, slowest ${seconds(done[done.length - 1] / 1000)}` : "None was answered.");
  } catch (error) {
    setText(byId("runs-note"), reasonOf(error));
  }
  clearInterval(drawing);
  drawRuns(runs, performance.now() - beganAt);
  setBusy(null);
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("many").addEventListener("click", sendMany);
byId("stop").addEventListener("click", () => running?.abort());
byId("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(); } });
repeat(readModel, 3000, inBanner("The model"));
