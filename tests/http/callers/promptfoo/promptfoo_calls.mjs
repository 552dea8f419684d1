// Calls of promptfoo: `node promptfoo_calls.mjs DEMO_URL SCRIPTED_URL` prints a JSON object, value by kind of call. One
// evaluation makes them: a provider for each kind, four at a time. The package lies where NODE_MODULES names it.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const [url] = process.argv.slice(2);
const at = { apiBaseUrl: `${url}/v1`, apiKey: 'none', temperature: 0 };
const greedy = { ...at, max_tokens: 16 };
const long = { ...at, max_tokens: 100 };
const schema = {
  type: 'object',
  properties: { times: { enum: [1, 2] } },
  required: ['times'],
  additionalProperties: false,
};
const tools = [{ type: 'function', function: { name: 'play', parameters: schema } }];
const format = { type: 'json_schema', json_schema: { name: 'times', strict: true, schema } };
const providers = {
  chat: ['openai:chat:demo', greedy],
  stream: ['openai:chat:demo', { ...greedy, stream: true }],
  completion: ['openai:completion:demo', greedy],
  responses: ['openai:responses:demo', { ...at, max_output_tokens: 16 }],
  messages: ['anthropic:messages:demo', { ...greedy, apiBaseUrl: url }],
  ollama: ['ollama:chat:demo', { temperature: 0, num_predict: 16 }],
  tool: ['openai:chat:demo', { ...long, tools, tool_choice: 'required' }],
  schema: ['openai:chat:demo', { ...long, response_format: format }],
};
const embedding = { id: 'openai:embedding:demo', config: at };
const prompt = 'Tell me a story about a cat.';

const folder = mkdtempSync(join(tmpdir(), 'promptfoo-'));
const evaluate = (name, config) => {
  const paths = [join(folder, `${name}.json`), join(folder, `${name}.out.json`)];
  writeFileSync(paths[0], JSON.stringify(config));
  const program = join(process.env.NODE_MODULES, '.bin', 'promptfoo');
  const options = ['--no-cache', '--no-table', '--no-progress-bar', '--no-write', '--max-concurrency', '4'];
  execFileSync(process.execPath, [program, 'eval', '-c', paths[0], '-o', paths[1], ...options], {
    cwd: folder,
    stdio: ['ignore', 2, 2],
    env: {
      ...process.env,
      OLLAMA_BASE_URL: url,
      PROMPTFOO_CONFIG_DIR: folder,
      PROMPTFOO_DISABLE_REMOTE_GENERATION: 'true',
      PROMPTFOO_DISABLE_TELEMETRY: 'true',
      PROMPTFOO_DISABLE_UPDATE: 'true',
    },
  });
  return JSON.parse(readFileSync(paths[1], 'utf8')).results.results;
};

try {
  const results = evaluate('calls', {
    prompts: ['{{text}}'],
    providers: [
      ...Object.entries(providers).map(([label, [id, config]]) => ({ id, label, config })),
      { id: 'echo', label: 'similar' },
    ],
    tests: [
      { vars: { text: prompt }, providers: Object.keys(providers) },
      {
        vars: { text: 'a dog' },
        providers: ['similar'],
        assert: [{ type: 'similar', value: 'a cat', threshold: -1, provider: { embedding } }],
      },
    ],
  });
  const found = Object.fromEntries(results.map((one) => [one.provider.label, one]));
  const { function: call } = found.tool.response.output[0];
  const usage = found.chat.response.tokenUsage;
  console.log(
    JSON.stringify({
      ...Object.fromEntries(Object.entries(found).map(([label, one]) => [label, one.response.output])),
      usage: [usage.prompt, usage.completion],
      tool: [call.name, JSON.parse(call.arguments)],
      similar: found.similar.gradingResult.score,
    }),
  );
} finally {
  rmSync(folder, { recursive: true });
}
