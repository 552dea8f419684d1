"""Calls of client libraries: `python sdk_calls.py NAME DEMO_URL SCRIPTED_URL` prints the result of each kind of call.

The demo server gets all calls except those of agents. The scripted server calls the tool `weather`, and answers with a
text after it has the result.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

PROMPT = "Tell me a story about a cat."
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
WEATHER = "What is the weather in Oslo?"
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0}
KEY = "none"
CONCURRENCY = 4


class Times(BaseModel):
    """How many times to play."""

    model_config = ConfigDict(extra="forbid")
    times: Literal[1, 2]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def parameters() -> dict[str, Any]:
    """Return the tool `play`, whose arguments are `Times`."""
    return {"type": "function", "function": {"name": "play", "parameters": Times.model_json_schema()}}


WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def gather(call: Callable[[], Any]) -> list[Any]:
    """Return the results of concurrent calls."""
    return list(await asyncio.gather(*(call() for _ in range(CONCURRENCY))))


def litellm(demo: str, scripted: str) -> dict[str, Any]:
    """Call through LiteLLM's providers `openai`, `hosted_vllm` and `anthropic`."""
    import litellm as library

    asked: dict[str, Any] = {"api_base": f"{demo}/v1", "api_key": KEY}
    chat: dict[str, Any] = {**asked, "messages": MESSAGES, **GREEDY}
    whole = library.completion("openai/demo", **chat)
    chunks = list(library.completion("hosted_vllm/demo", **chat, stream=True, stream_options={"include_usage": True}))
    forced = library.completion(
        "openai/demo", **{**chat, "max_tokens": 100}, tools=[parameters()], tool_choice="required"
    )
    call = forced.choices[0].message.tool_calls[0].function
    structured = library.completion("openai/demo", **{**chat, "max_tokens": 100}, response_format=Times)
    responses = library.responses(model="openai/demo", input=PROMPT, max_output_tokens=16, temperature=0, **asked)
    message = library.completion("anthropic/demo", api_base=demo, api_key=KEY, messages=MESSAGES, **GREEDY)
    turns: list[Any] = [{"role": "user", "content": WEATHER}]
    tools: dict[str, Any] = {"api_base": f"{scripted}/v1", "api_key": KEY, "tools": [WEATHER_TOOL], "messages": turns}
    first = library.completion("hosted_vllm/fake", **tools).choices[0].message
    turns.append(first)
    for one in first.tool_calls:
        told = weather(**json.loads(one.function.arguments))
        turns.append({"role": "tool", "tool_call_id": one.id, "content": told})
    embeddings = library.embedding("openai/demo", input=["a cat", "a dog"], **asked)

    async def answer() -> str:
        found = await library.acompletion("openai/demo", **chat)
        return str(found.choices[0].message.content)

    return {
        "chat": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "stream": library.stream_chunk_builder(chunks).choices[0].message.content,
        "async": asyncio.run(gather(answer)),
        "completion": library.text_completion(PROMPT, "text-completion-openai/demo", **GREEDY, **asked).choices[0].text,
        "tool": [call.name, json.loads(call.arguments)],
        "schema": json.loads(structured.choices[0].message.content),
        "responses": responses.output[0].content[0].text,
        "messages": message.choices[0].message.content,
        "agent": library.completion("hosted_vllm/fake", **tools).choices[0].message.content,
        "embeddings": [one["embedding"] for one in embeddings.data],
    }


def langchain_openai(demo: str, scripted: str) -> dict[str, Any]:
    """Call through LangChain's ChatOpenAI, over chats and over responses, and OpenAIEmbeddings."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    at: dict[str, Any] = {"base_url": f"{demo}/v1", "api_key": KEY, "model": "demo", "temperature": 0}
    model = ChatOpenAI(**at, max_tokens=16)
    long = ChatOpenAI(**at, max_tokens=100)
    whole = model.invoke(PROMPT)
    call = long.bind_tools([parameters()], tool_choice="required").invoke(PROMPT).tool_calls[0]
    responses = ChatOpenAI(**at, max_tokens=16, use_responses_api=True)
    told = [tool(weather)]
    agents = []
    for uses_responses in (False, True):
        agent = ChatOpenAI(base_url=f"{scripted}/v1", api_key=KEY, model="fake", use_responses_api=uses_responses)
        bound = agent.bind_tools(told)
        turns: list[Any] = [HumanMessage(WEATHER)]
        turns.append(bound.invoke(turns))
        turns += [told[0].invoke(one) for one in turns[-1].tool_calls]
        agents.append(bound.invoke(turns).text)

    async def answer() -> str:
        return str((await model.ainvoke(PROMPT)).content)

    return {
        "chat": whole.content,
        "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        "stream": "".join(chunk.text for chunk in model.stream(PROMPT)),
        "async": asyncio.run(gather(answer)),
        "completion": OpenAI(**at, max_tokens=16).invoke(PROMPT),
        "tool": [call["name"], call["args"]],
        "schema": long.with_structured_output(Times, method="json_schema").invoke(PROMPT).model_dump(),
        "responses": responses.invoke(PROMPT).text,
        "responses stream": "".join(chunk.text for chunk in responses.stream(PROMPT)),
        "agent": agents[0],
        "responses agent": agents[1],
        "embeddings": OpenAIEmbeddings(
            base_url=f"{demo}/v1", api_key=KEY, model="demo", check_embedding_ctx_length=False
        ).embed_documents(["a cat", "a dog"]),
    }


def langchain_anthropic(demo: str, scripted: str) -> dict[str, Any]:
    """Call through LangChain's ChatAnthropic."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    at: dict[str, Any] = {"base_url": demo, "api_key": KEY, "model": "demo", "temperature": 0}
    model = ChatAnthropic(**at, max_tokens=16)
    long = ChatAnthropic(**at, max_tokens=100)
    whole = model.invoke(PROMPT)
    play = {"name": "play", "input_schema": Times.model_json_schema()}
    call = long.bind_tools([play], tool_choice="play").invoke(PROMPT).tool_calls[0]
    told = tool(weather)
    bound = ChatAnthropic(base_url=scripted, api_key=KEY, model="fake", max_tokens=200).bind_tools([told])
    turns: list[Any] = [HumanMessage(WEATHER)]
    turns.append(bound.invoke(turns))
    turns += [told.invoke(one) for one in turns[-1].tool_calls]

    async def answer() -> str:
        return str((await model.ainvoke(PROMPT)).text)

    return {
        "messages": whole.text,
        "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        "stream": "".join(chunk.text for chunk in model.stream(PROMPT)),
        "async": asyncio.run(gather(answer)),
        "tool": [call["name"], call["args"]],
        "schema": long.with_structured_output(Times).invoke(PROMPT).model_dump(),
        "agent": bound.invoke(turns).text,
    }


def llama_index(demo: str, scripted: str) -> dict[str, Any]:
    """Call through LlamaIndex's OpenAILike, its FunctionAgent and OpenAILikeEmbedding."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    at: dict[str, Any] = {"api_base": f"{demo}/v1", "api_key": KEY, "context_window": 1024}
    model = OpenAILike(model="demo", is_chat_model=True, is_function_calling_model=True, **at, **GREEDY)
    plain = OpenAILike(model="demo", is_chat_model=False, **at, **GREEDY)
    turns = [ChatMessage(role="user", content=PROMPT)]
    whole = model.chat(turns)
    usage = whole.raw.usage
    theirs = {**at, "api_base": f"{scripted}/v1"}
    agent = FunctionAgent(
        tools=[weather],
        llm=OpenAILike(model="fake", is_chat_model=True, is_function_calling_model=True, max_tokens=200, **theirs),
    )

    async def run() -> str:
        return str(await agent.run(WEATHER))

    async def answer() -> str:
        return str((await model.achat(turns)).message.content)

    embedding = OpenAILikeEmbedding(model_name="demo", api_base=f"{demo}/v1", api_key=KEY)
    return {
        "chat": whole.message.content,
        "usage": [usage.prompt_tokens, usage.completion_tokens],
        "stream": "".join(chunk.delta or "" for chunk in model.stream_chat(turns)),
        "async": asyncio.run(gather(answer)),
        "completion": plain.complete(PROMPT).text,
        "agent": asyncio.run(run()),
        "embeddings": embedding.get_text_embedding_batch(["a cat", "a dog"]),
    }


def pydantic_ai(demo: str, scripted: str) -> dict[str, Any]:
    """Call through the agents of Pydantic AI, over chats and over responses."""
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    demos, scripts = (OpenAIProvider(base_url=f"{url}/v1", api_key=KEY) for url in (demo, scripted))
    settings: Any = {"max_tokens": 16, "temperature": 0}
    long: Any = {"max_tokens": 100, "temperature": 0}
    model = OpenAIChatModel("demo", provider=demos)
    agent = Agent(model, model_settings=settings)

    async def run() -> dict[str, Any]:
        whole = await agent.run(PROMPT)
        async with agent.run_stream(PROMPT) as stream:
            streamed = await stream.get_output()
        tool = await Agent(model, output_type=ToolOutput(Times, name="play"), model_settings=long).run(PROMPT)
        schema = await Agent(model, output_type=NativeOutput(Times), model_settings=long).run(PROMPT)
        responses = await Agent(OpenAIResponsesModel("demo", provider=demos), model_settings=settings).run(PROMPT)
        chats = Agent(OpenAIChatModel("fake", provider=scripts), tools=[weather])
        others = Agent(OpenAIResponsesModel("fake", provider=scripts), tools=[weather])

        async def answer() -> str:
            return str((await agent.run(PROMPT)).output)

        return {
            "chat": whole.output,
            "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
            "stream": streamed,
            "async": await gather(answer),
            "tool": ["play", tool.output.model_dump()],
            "schema": schema.output.model_dump(),
            "responses": responses.output,
            "agent": (await chats.run(WEATHER)).output,
            "responses agent": (await others.run(WEATHER)).output,
        }

    return asyncio.run(run())


def openai_agents(demo: str, scripted: str) -> dict[str, Any]:
    """Call through the OpenAI Agents SDK, over responses and over chats."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(max_tokens=16, temperature=0)
    long = agents.ModelSettings(max_tokens=100, temperature=0)

    async def run() -> dict[str, Any]:
        demos, scripts = (AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) for url in (demo, scripted))
        theirs = agents.OpenAIResponsesModel("demo", demos)
        one = agents.Agent("story", model=theirs, model_settings=settings)
        chat = agents.Agent("chat", model=agents.OpenAIChatCompletionsModel("demo", demos), model_settings=settings)
        typed = agents.Agent("typed", model=theirs, model_settings=long, output_type=Times)
        whole = await agents.Runner.run(one, PROMPT)
        tools = [agents.function_tool(weather)]
        others = agents.Agent("weather", model=agents.OpenAIResponsesModel("fake", scripts), tools=tools)
        chats = agents.Agent("weather", model=agents.OpenAIChatCompletionsModel("fake", scripts), tools=tools)
        live = agents.Runner.run_streamed(others, WEATHER)
        text = ""
        async for event in live.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta

        async def answer() -> str:
            return str((await agents.Runner.run(chat, PROMPT)).final_output)

        usage = whole.context_wrapper.usage
        return {
            "responses": whole.final_output,
            "usage": [usage.input_tokens, usage.output_tokens],
            "chat": (await agents.Runner.run(chat, PROMPT)).final_output,
            "async": await gather(answer),
            "schema": (await agents.Runner.run(typed, PROMPT)).final_output.model_dump(),
            "responses agent": (await agents.Runner.run(others, WEATHER)).final_output,
            "responses agent stream": text,
            "agent": (await agents.Runner.run(chats, WEATHER)).final_output,
        }

    return asyncio.run(run())


def instructor(demo: str, scripted: str) -> dict[str, Any]:
    """Call through Instructor, with a forced tool, a JSON schema and Anthropic's API."""
    import anthropic
    import instructor as library
    import openai

    theirs = openai.OpenAI(base_url=f"{demo}/v1", api_key=KEY)
    asked: dict[str, Any] = {"messages": MESSAGES, "response_model": Times, "max_tokens": 100, "temperature": 0}
    tools = library.from_openai(theirs, mode=library.Mode.TOOLS)
    schemas = library.from_openai(theirs, mode=library.Mode.JSON_SCHEMA)
    claude = library.from_anthropic(anthropic.Anthropic(base_url=demo, api_key=KEY))

    async def run() -> list[Any]:
        client = library.from_openai(openai.AsyncOpenAI(base_url=f"{demo}/v1", api_key=KEY), mode=library.Mode.TOOLS)

        async def answer() -> Any:
            return (await client.chat.completions.create(model="demo", **asked)).model_dump()

        return await gather(answer)

    told = {name: value for name, value in asked.items() if name != "temperature"}
    partial = list(tools.chat.completions.create_partial(model="demo", **asked))
    return {
        "tool": ["play", tools.chat.completions.create(model="demo", **asked).model_dump()],
        "tool stream": partial[-1].model_dump(),
        "async tool": asyncio.run(run()),
        "schema": schemas.chat.completions.create(model="demo", **asked).model_dump(),
        "messages tool": claude.messages.create(model="demo", **told).model_dump(),
    }


def dspy(demo: str, scripted: str) -> dict[str, Any]:
    """Call through DSPy: a model alone, and a ReAct program that calls a tool."""
    import dspy as library

    library.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
    model = library.LM("openai/demo", api_base=f"{demo}/v1", api_key=KEY, **GREEDY)
    whole = model(PROMPT)

    async def answer() -> str:
        found = await model.acall(PROMPT)
        return str(found[0])

    usage = model.history[0]["usage"]
    library.configure(lm=library.LM("openai/fake", api_base=f"{scripted}/v1", api_key=KEY, max_tokens=200))
    predicted = library.Predict("question -> answer")(question=WEATHER)
    return {
        "chat": whole[0],
        "usage": [usage["prompt_tokens"], usage["completion_tokens"]],
        "async": asyncio.run(gather(answer)),
        "predict": predicted.answer,
    }


def retries(openai_url: str, anthropic_url: str) -> dict[str, Any]:
    """Ask through three libraries at once, which retry if the server is full; start after a line of the input."""
    import litellm as library
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    print("imported", file=sys.stderr, flush=True)
    sys.stdin.readline()

    asked: dict[str, Any] = {"api_key": KEY, "model": "fake", "max_tokens": 200, "max_retries": 50}
    chat = ChatOpenAI(base_url=f"{openai_url}/v1", **asked)
    messages = ChatAnthropic(base_url=anthropic_url, **asked)
    asked |= {"model": "openai/fake", "api_base": f"{openai_url}/v1"}
    turns: list[Any] = [{"role": "user", "content": "There is rain in Oslo."}]

    async def run() -> dict[str, Any]:
        calls = (chat.ainvoke(turns), messages.ainvoke(turns), library.acompletion(**asked, messages=turns))
        first, second, third = await asyncio.gather(*calls)
        answers = {"langchain_openai": first.text, "langchain_anthropic": second.text}
        return {**answers, "litellm": third.choices[0].message.content}

    return asyncio.run(run())


def plain(value: Any) -> Any:
    """Return an array of another library as a list."""
    return np.asarray(value).tolist()


if __name__ == "__main__":
    name, *urls = sys.argv[1:]
    print(json.dumps(globals()[name](*urls), default=plain))
