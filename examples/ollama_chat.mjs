// A streamed chat, a call of a tool and what is served, by the ollama package for JavaScript.
//
//   npm install ollama
//   node examples/ollama_chat.mjs http://127.0.0.1:8000/v1 farsight-embedded 'the weather in rome'

import { Ollama } from "ollama";

const [baseURL, model, text] = process.argv.slice(2);
const headers = { Authorization: `Bearer ${process.env.FARSIGHT_API_KEY ?? "none"}` };
const client = new Ollama({ host: baseURL.replace(/\/v1$/, ""), headers });
const messages = [
  { role: "system", content: "Write in upper case:" },
  { role: "user", content: text },
];
const stream = await client.chat({ model, messages, stream: true, options: { temperature: 0 } });
let last;
for await (const line of stream) {
  process.stdout.write(line.message.content);
  last = line;
}
process.stdout.write(`\n${last.eval_count} tokens, ${last.done_reason}\n`);
const answer = await client.generate({ model, prompt: text, stream: false, options: { num_predict: 5 } });
console.log(answer.done_reason, answer.eval_count);
console.log((await client.list()).models[0].name, (await client.show({ model })).capabilities.join(", "));
console.log((await client.embed({ model, input: ["a cat", "a dog"] })).embeddings.length);
await client.pull({ model: "another" }).catch((error) => console.log(error.message));
