// Calls of the Vercel AI SDK: `node ai_sdk_calls.mjs DEMO_URL SCRIPTED_URL` prints a JSON object, value by kind of call.
// The packages lie where NODE_MODULES names them.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const required = createRequire(`${process.env.NODE_MODULES}/`);
const load = async (name) => import(pathToFileURL(required.resolve(name)));
const { embedMany, generateText, isStepCount, Output, streamText, tool } = await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { z } = await load('zod');

const [demoUrl, scriptedUrl] = process.argv.slice(2);
const prompt = 'Tell me a story about a cat.';
const question = 'What is the weather in Oslo?';
const options = { name: 'jpaged', apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true };
const compatible = (url) => createOpenAICompatible({ ...options, baseURL: `${url}/v1` });
const openai = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const demo = compatible(demoUrl);
const greedy = { prompt, maxOutputTokens: 16, temperature: 0 };
const times = z.object({ times: z.union([z.literal(1), z.literal(2)]) });
const play = tool({ inputSchema: times });
const weather = tool({
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});
const agent = { prompt: question, tools: { weather }, stopWhen: isStepCount(3), maxOutputTokens: 200 };

const whole = await generateText({ model: demo('demo'), ...greedy });
const stream = streamText({ model: demo('demo'), ...greedy });
const long = { ...greedy, maxOutputTokens: 100 };
const forced = await generateText({ model: demo('demo'), ...long, tools: { play }, toolChoice: 'required' });
const schema = await generateText({ model: demo('demo'), ...long, output: Output.object({ schema: times }) });
const responses = await generateText({ model: openai(demoUrl)('demo'), ...greedy });
const responsesStream = streamText({ model: openai(demoUrl)('demo'), ...greedy });
const many = await Promise.all(Array.from({ length: 4 }, () => generateText({ model: demo('demo'), ...greedy })));
const chats = await generateText({ model: compatible(scriptedUrl)('fake'), ...agent });
const others = streamText({ model: openai(scriptedUrl)('fake'), ...agent });
const othersText = await others.text;
const { embeddings } = await embedMany({ model: demo.embeddingModel('demo'), values: ['a cat', 'a dog'] });

console.log(
  JSON.stringify({
    chat: whole.text,
    usage: [whole.usage.inputTokens, whole.usage.outputTokens],
    stream: await stream.text,
    'stream usage': [(await stream.usage).inputTokens, (await stream.usage).outputTokens],
    async: many.map((one) => one.text),
    tool: [forced.toolCalls[0].toolName, forced.toolCalls[0].input],
    schema: schema.output,
    responses: responses.text,
    'responses stream': await responsesStream.text,
    agent: chats.text,
    'responses agent': othersText,
    embeddings,
  }),
);
