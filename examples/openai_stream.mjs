// A streamed chat, by the openai package for JavaScript.
//
//   npm install openai
//   node examples/openai_stream.mjs http://127.0.0.1:8000/v1 farsight-embedded 'the weather in rome'

import OpenAI from "openai";

const [baseURL, model, text] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: process.env.FARSIGHT_API_KEY ?? "none" });
const stream = await client.chat.completions.create({
  model,
  messages: [
    { role: "system", content: "Write in upper case:" },
    { role: "user", content: text },
  ],
  temperature: 0,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? "");
process.stdout.write("\n");
