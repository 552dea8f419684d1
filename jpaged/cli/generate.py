"""The subcommand `generate`: prompts -> texts, in this process."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from jpaged import json_text
from jpaged.cli.options import add_config_flags, add_sampling_flags, config_from, config_values, sampling_from
from jpaged.cli.startup import StartupReport
from jpaged.config import PROCESS_OPTIONS
from jpaged.errors import InvalidArgument
from jpaged.outputs import without_errors
from jpaged.types import CompletionOutput, RequestOutput, require_whole_characters

DESCRIPTION = """\
Generate from prompts in this process, without a server.

    jpaged generate demo --prompt "Once upon a time" --max-tokens 64 --temperature 0.8 --seed 1
    jpaged generate demo --chat --prompt "Tell me a story about a dragon." --json

Generated text goes to stdout, everything else to stderr.
"""
_SECTIONS = ("model", "cache", "scheduler", "parallel", "lora", "startup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the prompts, and every option except the server's."""
    parser.add_argument(
        "--prompt", dest="prompts", action="append", type=_text, metavar="TEXT", help="prompt text; repeatable"
    )
    parser.add_argument(
        "--prompt-token-ids",
        dest="prompts",
        action="append",
        type=_token_ids,
        metavar="IDS",
        help="prompt as token ids: 1,2,3; repeatable",
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat each prompt as a user message and apply the chat template"
    )
    parser.add_argument(
        "--adapter", default=None, metavar="NAME", help="name of a --lora adapter, used for all prompts"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt to stdout; non-finite numbers become null"
    )
    add_config_flags(parser, _SECTIONS, without={"seed", *PROCESS_OPTIONS})  # --seed is that of the requests
    add_sampling_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the outputs in the order of the prompts."""
    prompts: list[dict[str, Any]] = arguments.prompts or []
    if not prompts:
        raise InvalidArgument("--prompt", "is missing: give --prompt or --prompt-token-ids")
    if arguments.chat and any("prompt" not in prompt for prompt in prompts):
        raise InvalidArgument("--chat", "requires --prompt: token ids are not formatted by the chat template")
    for prompt in prompts:
        _check(prompt)
    sampling_from(arguments)  # reports invalid values before the model is loaded
    config = config_from(arguments)  # reports invalid values as flags
    names = [name for name, _ in config.lora.adapters]
    if arguments.adapter is not None and arguments.adapter not in names:
        raise InvalidArgument("--adapter", f"{arguments.adapter!r} is not one of --lora ({', '.join(names) or 'none'})")
    outputs = _outputs(arguments, prompts)
    for number, output in enumerate(outputs):
        if arguments.json:
            print(json_text.dumps(_as_json(output), ensure_ascii=False))
        else:
            _print_text(number, len(prompts), prompts[number], output)
    without_errors(outputs)
    return 0


def _check(prompt: dict[str, Any]) -> None:
    """Reject an invalid prompt before the model is loaded."""
    text = prompt.get("prompt")
    if text is not None:
        require_whole_characters("--prompt", text)
        if not text:
            raise InvalidArgument("--prompt", "is empty: give at least one character")


def _outputs(arguments: argparse.Namespace, prompts: Any) -> list[RequestOutput]:
    from jpaged.llm import LLM  # imports jax

    report = StartupReport(sys.stderr)
    values = config_values(arguments)
    model = values.pop("model", "demo")
    report.line(f"loading {model}")
    with LLM(model, progress=report.progress, **values) as llm:
        sampling = sampling_from(arguments, llm.get_default_sampling_params())
        report.line(f"generating from {len(prompts)} prompt{'s' if len(prompts) > 1 else ''}")
        if arguments.chat:
            turns = [[{"role": "user", "content": prompt["prompt"]}] for prompt in prompts]
            return llm.chat(turns, sampling, adapter=arguments.adapter)
        return llm.generate(prompts, sampling, adapter=arguments.adapter)


def _print_text(number: int, count: int, prompt: dict[str, Any], output: RequestOutput) -> None:
    if count > 1:
        print(f"{'' if number == 0 else chr(10)}--- {number + 1}: {prompt.get('prompt', prompt)}")
    if output.error is not None:
        print(f"error: {output.error}")
    for completion in output.outputs:
        print(f"[{completion.index}] {completion.text}" if len(output.outputs) > 1 else completion.text)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_completion_as_json(completion) for completion in output.outputs],
        "usage": dataclasses.asdict(output.usage),
        **({} if output.error is None else {"error": str(output.error)}),
    }


def _completion_as_json(completion: CompletionOutput) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "matched_stop": completion.matched_stop,
        "cumulative_logprob": completion.cumulative_logprob,
    }
    if completion.logprobs is not None:
        value["logprobs"] = [dataclasses.asdict(position) for position in completion.logprobs]
    return value


def _text(word: str) -> dict[str, Any]:
    return {"prompt": word}


def _token_ids(word: str) -> dict[str, Any]:
    try:
        token_ids = [int(part) for part in word.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a list of integers such as 1,2,3") from None
    if not all(0 <= token_id < 2**31 for token_id in token_ids):
        raise argparse.ArgumentTypeError(f"{word!r} has an id that is not from 0 to {2**31 - 1}")
    return {"prompt_token_ids": token_ids}
