// Sends requests to the served model as any client does, and draws when each token came.
const COPIES = 20;
// What the embedded model was trained on: an instruction and a text.
const EMBEDDED = [["Write in upper case:", "hello world"], ["Repeat the text:", "to be or not to be"], ["Replace every digit by #:", "call 555 1234"],
  ["First letter of each word:", "as soon as possible"], ["Give the last word:", "the quick brown fox"], ["Spell the digits:", "4711"],
  ["Write it three times:", "knock knock"], ["Make a bullet list:", "milk bread butter"], ["Count:", "3 to 12"], ["Is there a digit?", "route 66"],
  ["Open a ticket:", "printer on floor 2 is broken"]];
const EXAMPLES = ["Once upon a time", "Write one sentence about the sea.", "Count from one to ten."];
// What the embedded vision model was trained on: questions about pictures, which this page draws.
const SEEING = [["How many circles?", drawnShapes], ["How many triangles?", drawnShapes], ["How many shapes?", drawnShapes],
  ["Count each kind.", drawnShapes], ["Read the number.", drawnNumber]];
let model = null, running = null;

async function readModel() {
  if (model !== null) return;
  const [found] = (await getJson("v1/models")).data;
  model = found;
  setText(byId("model"), `${found.id} · ${whole(found.max_model_len)} tokens${found.emulated ? ` · emulated (${found.emulated}): answers are made up` : ""}`);
  const examples = examplesOf(found.id);
  byId("examples").replaceChildren(...examples.map((example) => {
    const button = make("button", "", `${example[0]} ${example[1]}`.trim());
    button.type = "button";
    button.addEventListener("click", () => choose(...example));
    return button;
  }));
  if (!byId("prompt").value) choose(...examples[0]);
}

// Of each: the instruction, the text, and what draws a picture for it, if anything.
function examplesOf(id) {
  if (id === "farsight-embedded") return EMBEDDED;
  return id === "farsight-embedded-vision" ? SEEING.map(([text, drawn]) => ["", text, drawn]) : EXAMPLES.map((text) => ["", text]);
}

function choose(instruction, text, drawn = null) {
  if (drawn !== null) attachDrawn(drawn());
  byId("instruction").value = instruction;
  byId("prompt").value = text;
}

function bodyOf() {
  const text = byId("prompt").value;
  const instruction = byId("instruction").value;
  const system = instruction ? [{role: "system", content: instruction}] : [];
  const isChat = byId("kind").value === "chat";
  if (pictures.length && !isChat) throw new Error("Pictures go with a chat: choose the kind chat, or remove them.");
  const parts = pictures.map((picture) => ({type: "image_url", image_url: {url: picture.url}}));
  const chat = {messages: [...system, {role: "user", content: parts.length ? [...parts, {type: "text", text}] : text}]};
  const content = isChat ? chat : {prompt: instruction ? `${instruction} ${text}` : text};
  return {model: model.id, ...content, max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value),
    priority: Number(byId("priority").value), stream: true, stream_options: {include_usage: true}};
}

// Streams one answer; `heard` is called with each part: (text, choice, ms since the start, finish reason or null).
async function stream(body, signal, heard) {
  const beganAt = performance.now();
  const key = sessionStorage.getItem(KEY);
  const headers = {"Content-Type": "application/json", ...(key === null ? {} : {Authorization: `Bearer ${key}`})};
  const address = byId("kind").value === "chat" ? "v1/chat/completions" : "v1/completions";
  const reply = await fetch(ROOT + address, {method: "POST", credentials: "omit", headers, body: JSON.stringify(body), signal});
  if (!reply.ok) {
    noteRefusal(reply.status);
    throw new Error((await reply.json()).error?.message ?? `the server answered ${reply.status}`);
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const result = {id: null, usage: null, ms: 0};
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) takeEvent(event, result, performance.now() - beganAt, heard);
  }
  result.ms = performance.now() - beganAt;
  return result;
}

function takeEvent(event, result, ms, heard) {
  const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
  if (!data || data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  result.id ??= chunk.id;
  result.usage = chunk.usage ?? result.usage;
  for (const choice of chunk.choices ?? []) heard(choice.delta?.content ?? choice.text ?? "", choice.index, ms, choice.finish_reason ?? null);
}

function noteRefusal(status) {
  if (status === 401 || status === 403) byId("key-form").hidden = false;
}

function drawTiming(times, end_ms) {
  const drawing = svg("svg", {class: "timing", viewBox: "0 0 1000 42", preserveAspectRatio: "none", role: "img"});
  times.forEach((ms, index) => drawing.append(svg("rect", {class: index ? "" : "first", x: 1000 * ms / end_ms, y: index ? 8 : 2, width: 2, height: index ? 26 : 38})));
  drawing.setAttribute("aria-label", `${counted(times.length, "part")} of the answer over ${seconds(end_ms / 1000)}`);
  byId("timing").replaceChildren(drawing, make("div", "lane-scale", make("span", "", "sent"), make("span", "", times.length ? `first token ${seconds(times[0] / 1000)}` : ""), make("span", "", seconds(end_ms / 1000))));
}

function numbersOf(result, times) {
  const tokens = result.usage ? `${counted(result.usage.prompt_tokens, "prompt token")}, ${counted(result.usage.completion_tokens, "output token")}, ` : "";
  const first = times.length ? `first after ${seconds(times[0] / 1000)}, ` : "";
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
    const result = await stream(bodyOf(), running.signal, (text, choice, ms) => {
      if (!text) return;
      answer.append(text);
      times.push(ms);
      setText(byId("numbers"), `${counted(times.length, "part")}, the first after ${seconds(times[0] / 1000)}`);
      if (times.length % 4 === 0) drawTiming(times, ms);
    });
    drawTiming(times, result.ms);
    setText(byId("numbers"), numbersOf(result, times));
    await explain(result.id);
  } catch (error) {
    byId("numbers").classList.toggle("bad", error.name !== "AbortError");
    setText(byId("numbers"), error.name === "AbortError" ? "Stopped; the server frees its memory within a step." : reasonOf(error));
  }
  setBusy(null);
}

let explained = null;  // of the last answer, for the choice of one of its runs

async function explain(id) {
  try {
    explained = await getJson(`v1/requests/${encodeURIComponent(id)}`);
    explainRun(0);
  } catch (error) {
    setText(byId("explain-note"), reasonOf(error));
  }
}

function explainRun(index) {
  const choices = explained?.choices.filter((choice) => choice.index === index) ?? [];
  if (!choices.length) return;
  drawExplanation(byId("explanation"), {...explained, choices});
  setText(byId("explain-note"), explained.choices.length > 1 ? `${explained.id}, run ${index + 1}` : explained.id);
}

function runRow(index) {
  const wait = make("span", "wait"), flow = make("span", "stream");
  const text = make("span", "", "waits");
  const button = make("button", "", `${index + 1}`);
  button.type = "button";
  button.title = "Explains this run";
  button.addEventListener("click", () => explainRun(index));
  return {node: make("div", "run", button, make("div", "bar", wait, flow), text), wait, flow, text, first: null, end: null};
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

// One request with 20 choices: a browser opens only a few connections to a server, so 20 requests would wait for each
// other in the browser. The server runs each choice as a request of its own.
async function sendMany() {
  if (running !== null) return;
  setBusy(new AbortController());
  byId("runs-panel").hidden = false;
  const runs = Array.from({length: COPIES}, (_, index) => runRow(index));
  byId("runs").replaceChildren(...runs.map((run) => run.node));
  setText(byId("runs-note"), "Running");
  const beganAt = performance.now();
  const drawing = setInterval(() => drawRuns(runs, performance.now() - beganAt), 100);
  try {
    await readModel();
    const result = await stream({...bodyOf(), n: COPIES}, running.signal, (text, choice, ms, reason) => {
      const run = runs[choice];
      if (text) run.first ??= ms;
      if (reason === null) return;
      run.end = ms;
      setText(run.text, `${reason} after ${seconds(ms / 1000)}`);
    });
    const ends = runs.map((run) => run.end ?? result.ms).sort((a, b) => a - b);
    const mean = ends.reduce((sum, ms) => sum + ms, 0) / ends.length;
    const tokens = result.usage ? `${counted(result.usage.completion_tokens, "token")}; ` : "";
    setText(byId("runs-note"), `${tokens}mean ${seconds(mean / 1000)}, fastest ${seconds(ends[0] / 1000)}, slowest ${seconds(ends[ends.length - 1] / 1000)}`);
    await explain(result.id);
  } catch (error) {
    setText(byId("runs-note"), error.name === "AbortError" ? "Stopped." : reasonOf(error));
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
