// A chat with the served model, as any client sends it, and beside it what the server does for the answer.
const CHAT = "farsight-chat", LEAST_DRAW_MS = 80, LOOK_MS = 1000;
const LIMIT = 1024;  // tokens of an answer unless the user says otherwise, or half of what the model can hold
// What the embedded model was trained on: an instruction and a text.
const EMBEDDED = [["Write in upper case:", "hello world"], ["Repeat the text:", "to be or not to be"], ["Replace every digit by #:", "call 555 1234"],
  ["First letter of each word:", "as soon as possible"], ["Give the last word:", "the quick brown fox"], ["Spell the digits:", "4711"],
  ["Write it three times:", "knock knock"], ["Make a bullet list:", "milk bread butter"], ["Count:", "3 to 12"], ["Is there a digit?", "route 66"],
  ["Open a ticket:", "printer on floor 2 is broken"]];
const EXAMPLES = ["Write a short poem about the sea.", "Explain what a cache is, in three sentences.", "List five uses for a paper clip."];
// What the embedded vision model was trained on: questions about pictures, which this page draws.
const SEEING = [["How many circles?", drawnShapes], ["How many triangles?", drawnShapes], ["How many shapes?", drawnShapes],
  ["Count each kind.", drawnShapes], ["Read the number.", drawnNumber]];
let model = null, running = null;
let messages = [];  // {role, content, pictures: [url], id, note, thought}

async function readModel() {
  if (model !== null) return;
  const [found] = (await getJson("v1/models")).data;
  model = found;
  const preset = found.preset ? [" · preset ", make("b", "", found.preset)] : [];
  const emulated = found.emulated ? ` · emulated (${found.emulated}): answers are made up` : "";
  byId("health").replaceChildren(make("span", "", make("b", "", found.id), ` · ${whole(found.max_model_len)} tokens`, ...preset, emulated));
  byId("health").dataset.level = "ok";
  setText(byId("hello-model"), found.id);
  byId("seeing").hidden = !sees();
  byId("max-tokens").placeholder = Math.min(LIMIT, Math.floor(found.max_model_len / 2));
  byId("examples").replaceChildren(...examplesOf(found.id).map(([instruction, text, drawn]) => {
    const button = make("button", "", `${instruction} ${text}`.trim());
    button.type = "button";
    button.addEventListener("click", () => {
      if (drawn) attachDrawn(drawn());
      byId("instruction").value = instruction;
      byId("prompt").value = text;
      fitPrompt();
      byId("prompt").focus();
    });
    return button;
  }));
}

const sees = () => model.input_modalities.includes("image");

// Of each: the instruction, the text, and what draws a picture for it, if anything.
function examplesOf(id) {
  if (id === "farsight-embedded") return EMBEDDED;
  return id === "farsight-embedded-vision" ? SEEING.map(([text, drawn]) => ["", text, drawn]) : EXAMPLES.map((text) => ["", text]);
}

function contentOf({content, pictures: urls = []}) {
  return urls.length ? [...urls.map((url) => ({type: "image_url", image_url: {url}})), {type: "text", text: content}] : content;
}

function bodyOf() {
  const isChat = byId("kind").value === "chat", instruction = byId("instruction").value.trim();
  const last = messages[messages.length - 1];
  if (last.pictures?.length && !isChat) throw new Error("Pictures go with a chat: send as a chat, or remove them.");
  const system = instruction ? [{role: "system", content: instruction}] : [];
  const told = messages.map((each) => ({role: each.role, content: contentOf(each)}));
  const content = isChat ? {messages: [...system, ...told]} : {prompt: instruction ? `${instruction} ${last.content}` : last.content};
  const body = {model: model.id, ...content, max_tokens: Number(byId("max-tokens").value || byId("max-tokens").placeholder), stream: true, stream_options: {include_usage: true}};
  for (const [name, field] of [["temperature", "temperature"], ["top_p", "top-p"], ["priority", "priority"]]) {
    if (byId(field).value !== "") body[name] = Number(byId(field).value);
  }
  return body;
}

// Streams one answer into `run`, which `draw` shows after every event.
async function stream(body, run, draw) {
  const key = sessionStorage.getItem(KEY);
  const headers = {"Content-Type": "application/json", ...(key === null ? {} : {Authorization: `Bearer ${key}`})};
  const address = body.messages ? "v1/chat/completions" : "v1/completions";
  const reply = await fetch(ROOT + address, {method: "POST", credentials: "omit", headers, body: JSON.stringify(body), signal: run.controller.signal});
  if (!reply.ok) {
    if (reply.status === 401 || reply.status === 403) byId("key-form").hidden = false;
    throw new Error((await reply.json()).error?.message ?? `the server answered ${reply.status}`);
  }
  const [median, late] = ["p50", "p90"].map((level) => reply.headers.get(`farsight-eta-${level}`));
  if (median !== null) run.promised = {median_ms: 1000 * median, late_ms: 1000 * late};
  run.ends = run.promised;
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) takeEvent(event, run);
    draw();
  }
}

function takeEvent(event, run) {
  const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
  if (!data || data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  if (run.id === null && chunk.id) {
    run.id = chunk.id;
    lookAt(run);
  }
  run.usage = chunk.usage ?? run.usage;
  for (const {delta, text, finish_reason: reason} of chunk.choices ?? []) {
    const said = delta?.content ?? text ?? "", thought = delta?.reasoning_content ?? "";
    run.message.content += said;
    run.message.thought = (run.message.thought ?? "") + thought;
    run.reason = reason ?? run.reason;
    if (said || thought) run.times.push(passed(run));
  }
}

const passed = (run) => (run.endedAt ?? performance.now()) - run.beganAt;

// Asks what the server knows of the request that runs: its decisions so far, and when it will end from now.
async function lookAt(run) {
  while (run === running || !run.isExplained) {
    run.isExplained = run !== running;
    try {
      const explanation = await getJson(`v1/requests/${encodeURIComponent(run.id)}`);
      if (run !== shown) return;
      const [choice] = explanation.choices;
      if (typeof choice?.eta_p50 === "number" && run === running) run.ends = {median_ms: passed(run) + 1000 * choice.eta_p50, late_ms: passed(run) + 1000 * choice.eta_p90};
      drawExplanation(byId("explanation"), explanation);
      const page = make("a", "", "its page");
      page.href = `${ROOT}dashboard/requests/${encodeURIComponent(run.id)}`;
      byId("explain-note").replaceChildren("What was decided about it, and why; more on ", page, ".");
    } catch (error) {
      setText(byId("explain-note"), reasonOf(error));
    }
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

const ahead = (ms, run) => Math.max(0, ms - passed(run)) / 1000;
let shown = null;  // the run in the column

function etaOf(run) {
  if (run !== running) {
    const promised = run.promised ? `promised: ${seconds(run.promised.median_ms / 1000)}, 9 of 10 within ${seconds(run.promised.late_ms / 1000)}` : "";
    return [`${run.problem ? "stopped" : "ended"} after ${seconds(passed(run) / 1000)}`, promised];
  }
  if (!run.ends) return [run.times.length ? "answers" : `waits for ${seconds(passed(run) / 1000)}`, "when it ends is not known yet"];
  const [median, late] = [ahead(run.ends.median_ms, run), ahead(run.ends.late_ms, run)];
  return median ? [`ends in ${median.toFixed(1)} s`, `(9 of 10 times within ${late.toFixed(1)} s)`]
    : late ? ["ends any moment", `(9 of 10 times within ${late.toFixed(1)} s)`] : ["takes longer than 9 of 10 do", ""];
}

function drawColumn(run) {
  const [eta, late] = etaOf(run);
  if (byId("eta").children.length !== 1 || byId("eta").dataset.run !== "1") byId("eta").replaceChildren(make("span"), " ", make("small"));
  byId("eta").dataset.run = "1";
  setText(byId("eta").children[0], eta);
  setText(byId("eta").children[1], late);
  setText(run.timeLeft, run === running ? `${eta} ${late}` : "");
  drawTiming(run);
  const {times, usage} = run, flow_s = (times[times.length - 1] - times[0]) / 1000, tokens = usage?.completion_tokens ?? times.length;
  const rows = [["First token", times.length ? `after ${seconds(times[0] / 1000)}` : "–"], ["Tokens", whole(tokens)], ["Tokens a second", flow_s > 0 ? amount((tokens - 1) / flow_s) : "–"]];
  if (usage) rows.push(["Prompt", `${counted(usage.prompt_tokens, "token")}, ${whole(usage.prompt_tokens_details?.cached_tokens ?? 0)} cached`]);
  if (usage?.gpu_seconds) rows.push(["Cost", `${seconds(usage.gpu_seconds)} of the device`]);
  if (run.reason) rows.push(["End", run.reason]);
  byId("numbers").replaceChildren(...rows.flatMap(([name, text]) => [make("dt", "", name), make("dd", "", text)]));
}

// A tick for each part of the answer; shaded: when it ends, between the median and the time that 9 of 10 keep.
function drawTiming(run) {
  const {times, ends} = run, now_ms = passed(run), isOver = run !== running;
  const end_ms = Math.max(isOver ? now_ms : Math.max(now_ms * 1.02, ends?.late_ms ?? 0), 1), at = (ms) => 1000 * ms / end_ms;
  const drawing = svg("svg", {class: "timing", viewBox: "0 0 1000 44", preserveAspectRatio: "none", role: "img"});
  if (ends && !isOver) drawing.append(svg("rect", {class: "ends", x: at(ends.median_ms), y: 0, width: Math.max(4, at(ends.late_ms) - at(ends.median_ms)), height: 44}));
  times.forEach((ms, index) => drawing.append(svg("rect", {class: index ? "" : "first", x: at(ms), y: index ? 9 : 3, width: 2, height: index ? 26 : 38})));
  drawing.setAttribute("aria-label", `${counted(times.length, "part")} of the answer over ${seconds(now_ms / 1000)}`);
  byId("timing").replaceChildren(drawing, make("div", "lane-scale", make("span", "", "sent"), make("span", "", seconds(end_ms / 1000))));
}

function messageNode(message, index) {
  if (message.role === "user") {
    const thumbs = (message.pictures ?? []).map((url, at) => Object.assign(make("img"), {src: url, alt: `Picture ${at + 1}`}));
    return make("div", "message user", ...(thumbs.length ? [make("div", "thumbs", ...thumbs)] : []), make("div", "said", message.content));
  }
  const answer = make("div", "answer"), under = make("div", "under"), thought = make("div");
  const thinking = make("details", "thought", make("summary", "", "Thinking"), thought);
  const node = make("div", "message assistant", thinking, answer, under);
  answer.dataset.testid = "answer";
  const draw = () => {
    thinking.hidden = !message.thought;
    setText(thought, message.thought ?? "");
    answer.replaceChildren(...markdown(message.content));
  };
  draw();
  return {node, answer, under, draw, index};
}

function drawUnder({under}, message, index) {
  const note = make("span", message.isBad ? "bad" : "", message.note ?? "");
  note.dataset.testid = "said-note";
  if (message.isBad) note.setAttribute("role", "alert");
  const again = make("button", "quiet", message.content ? "Regenerate" : "Try again");
  again.type = "button";
  again.dataset.testid = "regenerate";
  again.addEventListener("click", () => {
    if (running) return;
    messages.length = index;
    drawLog();
    answerNow();
  });
  under.replaceChildren(note, ...(message.content ? [copyButton(() => message.content)] : []), ...(index === messages.length - 1 ? [again] : []));
}

function drawLog() {
  byId("log").querySelectorAll(".message").forEach((node) => node.remove());
  byId("hello").hidden = messages.length > 0;
  messages.forEach((message, index) => {
    const made = messageNode(message, index);
    byId("log").append(made.node ?? made);
    if (made.under) drawUnder(made, message, index);
  });
}

// The chat lives as long as its tab; nothing of it is written elsewhere.
function keep() {
  try {
    sessionStorage.setItem(CHAT, JSON.stringify(messages));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    sessionStorage.removeItem(CHAT);
    notePictures("This chat is too large to outlive a reload of the page.");
  }
}

function setBusy(run) {
  running = run;
  byId("send").hidden = byId("fresh").disabled = run !== null;
  byId("stop").hidden = run === null;
}

const isAtEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 120;

async function answerNow() {
  const message = {role: "assistant", content: ""};
  const made = messageNode(message, messages.length);
  const run = {controller: new AbortController(), beganAt: performance.now(), endedAt: null, id: null, times: [], usage: null, message, timeLeft: make("span", "narrow")};
  setBusy(run);
  shown = run;
  made.under.append(run.timeLeft);
  made.answer.classList.add("waits");
  byId("log").append(made.node);
  byId("explanation").replaceChildren();
  setText(byId("explain-note"), "");
  let drawnAt = 0;
  const draw = () => {
    if (performance.now() - drawnAt < LEAST_DRAW_MS) return;
    const follows = isAtEnd();
    made.draw();
    if (follows) scrollTo({top: document.documentElement.scrollHeight});
    drawnAt = performance.now();
  };
  const clockwork = setInterval(() => drawColumn(run), 200);
  drawColumn(run);
  scrollTo({top: document.documentElement.scrollHeight});
  try {
    await readModel();
    await stream(bodyOf(), run, draw);
  } catch (error) {
    run.problem = error.name === "AbortError" ? "Stopped; the server frees its memory within a step." : reasonOf(error);
    message.isBad = error.name !== "AbortError";
  }
  run.endedAt = performance.now();
  clearInterval(clockwork);
  made.answer.classList.remove("waits");
  message.note = run.problem ?? `${counted(run.usage?.completion_tokens ?? run.times.length, "token")} in ${seconds(passed(run) / 1000)}${run.reason === "length" ? ", ended at its limit" : ""}`;
  messages.push(message);
  setBusy(null);
  drawColumn(run);
  drawLog();
  keep();
}

function send() {
  const text = byId("prompt").value.trim();
  if (running || model === null || !text) return;
  const last = messages[messages.length - 1];
  if (last?.role === "assistant" && !last.content) messages.pop();  // an answer that failed is no part of the chat
  if (messages[messages.length - 1]?.role === "user") messages.pop();
  messages.push({role: "user", content: text, pictures: pictures.map((picture) => picture.url)});
  pictures = [];
  drawPictures();
  notePictures("");
  byId("prompt").value = "";
  fitPrompt();
  byId("settings").open = false;
  drawLog();
  answerNow();
}

function fitPrompt() {
  byId("prompt").style.height = "auto";
  byId("prompt").style.height = `${byId("prompt").scrollHeight}px`;
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", () => running?.controller.abort());
byId("fresh").addEventListener("click", () => {
  messages = [];
  keep();
  drawLog();
  byId("prompt").focus();
});
byId("prompt").addEventListener("input", fitPrompt);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (byId("settings").open) byId("settings").open = false;
  else running?.controller.abort();
});
setText(byId("key-role"), "serve");
messages = JSON.parse(sessionStorage.getItem(CHAT) ?? "[]");
drawLog();
follow.used = true;  // what the health of the components is, this page need not know
repeat(readModel, 3000, inBanner("The model"));
