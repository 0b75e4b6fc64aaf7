// "What if": asks the simulator what an ended request would have taken with another preset, number of replicas or
// priority. It costs the server up to a second of work, so it is asked for by a button alone.
const WHAT_IF_MS = 20000;

function whatIfField(name, label, type, about) {
  const input = make("input");
  input.name = name;
  input.type = type;
  input.title = about;
  input.spellcheck = false;
  input.autocomplete = "off";
  return make("label", "note", `${label} `, input);
}

function whatIfForm(id) {
  const said = make("p", "note");
  said.setAttribute("role", "status");
  said.dataset.testid = "what-if-answer";
  const button = make("button", "", "What would it have taken?");
  const form = make("form", "what-if", make("h3", "", "What if"), whatIfField("preset", "Preset", "text", "Such as fcfs"),
    whatIfField("replicas", "Replicas", "number", "1 to 64"), whatIfField("priority", "Priority", "number", "A whole number"), button);
  form.dataset.testid = "what-if";
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = [...new FormData(form)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
    if (!asked.length) return setText(said, "Fill in at least one of preset, replicas and priority.");
    button.disabled = true;
    setText(said, "Simulating …");
    try {
      const reply = await ask(`${ROOT}v1/requests/${encodeURIComponent(id)}/what-if?${new URLSearchParams(asked)}`, WHAT_IF_MS);
      const body = await reply.json();
      setText(said, reply.ok ? body.text : body.error?.message ?? `the server answered ${reply.status}`);
    } catch (error) {
      setText(said, reasonOf(error));
    }
    button.disabled = false;
  });
  return [form, said];
}
