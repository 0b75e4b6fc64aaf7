// A call of a tool, by the AI SDK.
//
//   npm install ai @ai-sdk/openai-compatible zod
//   node examples/ai_sdk_tools.mjs http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, tool } from "ai";
import { z } from "zod";

const [baseURL, model, prompt] = process.argv.slice(2);
const farsight = createOpenAICompatible({ name: "farsight", baseURL, apiKey: process.env.FARSIGHT_API_KEY ?? "none" });

const answer = await generateText({
  model: farsight(model),
  prompt,
  tools: {
    get_weather: tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string().max(20) }),
      execute: async ({ city }) => `It is sunny in ${city}.`,
    }),
  },
  toolChoice: "required",
  maxOutputTokens: 300,
  temperature: 0,
});
for (const result of answer.toolResults) {
  console.log(`${result.toolName}(${JSON.stringify(result.input)}): ${result.output}`);
}
