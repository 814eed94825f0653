// OpenAI's client for Node reads our streams and errors; what it found goes to stdout as JSON.
// node node_client.mjs FOLDER-OF-NODE-MODULES URL KEY

import {createRequire} from "node:module";

const [folder, baseURL, apiKey] = process.argv.slice(2);
const {default: OpenAI} = await import(createRequire(`${folder}/`).resolve("openai"));
const client = new OpenAI({baseURL, apiKey, maxRetries: 0});
const messages = [{role: "user", content: "Where is the truth? 世界 🙂"}];
const found = {};

const asked = {model: "tiny", messages, max_completion_tokens: 24, temperature: 0};
found.whole = (await client.chat.completions.create(asked)).choices[0].message.content;
found.streamed = "";
found.reasons = [];
for await (const chunk of await client.chat.completions.create({...asked, stream: true, stream_options: {include_usage: true}})) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.choices[0]?.finish_reason) found.reasons.push(chunk.choices[0].finish_reason);
  found.usage = chunk.usage ?? found.usage;
}

const tools = [{type: "function", function: {name: "city", parameters: {
  type: "object", properties: {name: {enum: ["Rom", "Bonn"]}}, required: ["name"], additionalProperties: false}}}];
const runner = client.chat.completions.stream({...asked, max_completion_tokens: 200, tools,
  tool_choice: {type: "function", function: {name: "city"}}, logit_bias: JSON.parse(process.env.SPACES)});
const message = (await runner.finalChatCompletion()).choices[0].message;
found.call = [message.tool_calls[0].function.name, JSON.parse(message.tool_calls[0].function.arguments)];

found.errors = [];
for (const bad of [{...asked, temperature: 3}, {...asked, model: "gpt"}, {...asked, top_p: 0, stream: true}]) {
  await client.chat.completions.create(bad).catch((error) => found.errors.push([error.status, error.param, error.type]));
}
const left = await client.completions.create({model: "tiny", prompt: "x", max_tokens: 400, stream: true});
for await (const chunk of left) { found.left = chunk.object; break; }  // closes the connection
console.log(JSON.stringify(found));
