"""The tables of request fields: vLLM's and those of OpenAI's chats in docs/http.md, those of OpenAI's responses in
docs/responses.md, and those of Anthropic's package in docs/messages.md.

`python -m docs.site.vllm_fields` writes all of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from docs.site.links import ROOT
from jpaged import anthropic, chat
from jpaged.openai import chat_tools, embeddings, request, response_input, responses
from jpaged.openai.request import Neutral, neutral_fields

PAGE = ROOT / "docs" / "http.md"
ANTHROPIC_PAGE = ROOT / "docs" / "messages.md"
RESPONSES_PAGE = ROOT / "docs" / "responses.md"
BEGIN, END = "<!-- fields: python -m docs.site.vllm_fields -->\n", "<!-- end of fields -->\n"
OPENAI_BEGIN = "<!-- fields of OpenAI: python -m docs.site.vllm_fields -->\n"
VERSION = "0.33"
FIELDS = {
    "/v1/completions": """
        add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
        ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds
        prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs suffix temperature
        thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
        watermarking
    """,
    "/v1/chat/completions": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens
        mm_payload mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs
        reasoning_effort repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
        return_weight_versions routed_experts_prompt_start seed session_id skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    """,
    "/v1/responses": """
        background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
        ignore_eos include include_reasoning include_stop_str_in_output input instructions kv_transfer_params
        logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload
        mm_processor_kwargs model parallel_tool_calls presence_penalty previous_input_messages
        previous_response_id priority prompt prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning repetition_penalty request_id return_mm_kwargs safety_identifier seed service_tier session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids store stream structured_outputs
        temperature text tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs watermarking
    """,
    "/v1/messages": """
        cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata
        mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking
        tool_choice tools top_k top_p vllm_xargs watermarking
    """,
    "/v1/embeddings": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs messages
        mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/pooling": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message data dimensions embed_dtype encoding_format endianness input media_io_kwargs
        messages mm_processor_kwargs model padding priority request_id task truncate_prompt_tokens
        truncation_side use_activation user
    """,
    "/classify": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message input media_io_kwargs messages mm_processor_kwargs model padding priority
        request_id truncate_prompt_tokens truncation_side use_activation user
    """,
    "/v1/score": """
        cache_salt chat_template_kwargs data_1 data_2 documents instruction items max_tokens_per_doc
        max_tokens_per_query mm_processor_kwargs model padding priority queries request_id text_1 text_2
        truncate_prompt_tokens truncation_side use_activation user
    """,
    "/v1/rerank": """
        cache_salt chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query
        mm_processor_kwargs model padding priority query request_id top_n truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/tokenize": """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools
    """,
    "/detokenize": """
        model tokens
    """,
}
"""Fields of vLLM's request classes of this version, by path."""
OWN: dict[str, Collection[str]] = {
    "/v1/completions": request.OF_COMPLETIONS,
    "/v1/chat/completions": request.OF_CHATS,
    "/v1/responses": responses.OF_RESPONSES,
    "/v1/messages": anthropic.OF_MESSAGES,
    "/v1/embeddings": embeddings.OF_EMBEDDINGS | embeddings.OF_EMBEDDED_CHATS,
    "/pooling": embeddings.OF_POOLING | embeddings.OF_POOLED_CHATS,
    "/classify": embeddings.OF_CLASSIFYING | embeddings.OF_CLASSIFIED_CHATS,
    "/v1/score": embeddings.OF_SCORES,
    "/v1/rerank": embeddings.OF_RERANKING,
    "/tokenize": embeddings.OF_TOKENIZED_TEXTS | embeddings.OF_TOKENIZED_CHATS | {"messages"},
    "/detokenize": embeddings.OF_DETOKENIZING,
}
"""Fields that have an effect, by path."""
ANTHROPIC_VERSION = "2.14.0"
ANTHROPIC = {
    "body": """
        betas billing_policy cache_control compaction container context_management diagnostics
        fallback_credit_token fallbacks inference_geo max_tokens mcp_servers messages metadata model
        output_config service_tier speed stop_sequences stream system thinking thread tool_choice tools
        user_profile_id workspace_id
    """,
    "body.messages[]": "clear_at content output_config role",
    "body.tools[]": """
        allowed_callers cache_control defer_loading description eager_input_streaming input_examples
        input_schema name strict type
    """,
    "body.tool_choice": "disable_parallel_tool_use name type",
    "body.tool_choice.type": "any auto none tool",
    "body.thinking": "block_binding budget_tokens display type",
    "body.thinking.type": "adaptive between_tools disabled enabled",
    "body.output_config": "effort format task_budget",
    "blocks": """
        advisor_tool_result bash_code_execution_tool_result browser_state code_execution_tool_result compaction
        container_upload document fallback image mcp_tool_listing mcp_tool_result mcp_tool_use
        redacted_thinking search_result server_tool_use text text_editor_code_execution_tool_result thinking
        tool_addition tool_reference tool_removal tool_result tool_search_tool_result tool_use
        web_fetch_tool_result web_search_tool_result
    """,
    "text": "cache_control citations text type",
    "thinking": "signature thinking type",
    "redacted_thinking": "data type",
    "tool_use": "cache_control caller id input name toolset_name type",
    "tool_result": "cache_control content is_error tool_use_id toolset_name type",
    "document": "cache_control citations context source title type",
    "search_result": "cache_control citations content source title type",
    "tool_reference": "cache_control tool_name type",
    "tool_addition": "cache_control tool type",
    "tool_removal": "cache_control tool type",
}
"""Names in the types of Anthropic's package of this version: by place in a body, types of blocks, fields of blocks."""
OPENAI_VERSION = "3.57.0"
OPENAI = {
    "/v1/completions": """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
        stream stream_options suffix temperature top_p user
    """,
    "/v1/embeddings": "dimensions encoding_format input model user",
    "/v1/chat/completions": """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
        messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
        safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
        top_logprobs top_p user verbosity web_search_options
    """,
    "chat messages": "audio content function_call name refusal role tool_call_id tool_calls",
    "chat roles": "assistant developer function system tool user",
    "chat parts": "file image_url input_audio text",
    "chat parts of type text": "prompt_cache_breakpoint text type",
    "chat parts of type image_url": "image_url prompt_cache_breakpoint type",
    "chat tool_calls": "custom function id type",
    "chat tools": "custom function",
    "chat tools of type function": "description name parameters strict",
    "chat tool_choice": "allowed_tools custom function",
    "chat response_format": "json_object json_schema text",
    "chat stream_options": "include_obfuscation include_usage",
    "/v1/responses": """
        access_programs background background_options context_management conversation image include input
        instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
        previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
        safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs
        top_p truncation user
    """,
    "items": """
        additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction
        compaction_trigger computer_call computer_call_output configuration_update custom_tool_call
        custom_tool_call_output file_search_call function_call function_call_output image_generation_call
        item_reference local_shell_call local_shell_call_output mcp_approval_request mcp_approval_response mcp_call
        mcp_list_tools message program program_output reasoning shell_call shell_call_output tool_search_call
        tool_search_output web_search_call
    """,
    "parts": "input_file input_image input_text output_text refusal",
    "tools": """
        apply_patch code_interpreter computer computer_use_preview custom file_search function image_generation
        local_shell mcp namespace programmatic_tool_calling shell tool_search web_search web_search_2025_08_26
        web_search_preview web_search_preview_2025_03_11
    """,
    "tool_choice": """
        allowed_tools apply_patch code_interpreter computer computer_use computer_use_preview custom file_search
        function image_generation mcp programmatic_tool_calling shell web_search_preview
        web_search_preview_2025_03_11
    """,
    "include": """
        code_interpreter_call.outputs computer_call_output.output.image_url file_search_call.results
        message.input_image.image_url message.output_text.logprobs reasoning.encrypted_content
        web_search_call.action.sources web_search_call.results
    """,
    "reasoning": "context effort generate_summary mode summary",
    "text": "format verbosity",
    "stream_options": "include_obfuscation",
    "items of type message": "content id phase role status type",
    "items of type reasoning": "content encrypted_content id status summary type",
    "items of type function_call": "arguments async call_id caller id name namespace status type",
    "items of type function_call_output": "call_id caller id name namespace output status type",
    "items of type custom_tool_call": "async call_id caller id input name namespace type",
    "items of type custom_tool_call_output": "call_id caller id output type",
    "items of type additional_tools": "id role tools type",
    "parts of type input_text": "prompt_cache_breakpoint text type",
    "parts of type output_text": "annotations logprobs text type",
    "parts of type input_image": "detail file_id image_url prompt_cache_breakpoint type",
    "tools of type function": """
        allowed_callers async defer_loading description name output_schema parameters strict type
    """,
    "tools of type custom": "allowed_callers async defer_loading description format name type",
    "tools of type namespace": "description name tools type",
}
"""Names in the types of OpenAI's package of this version, by path, and by place in bodies of chats and responses."""
_HOSTED_TOOLS = frozenset(OPENAI["tools"].split()) - response_input.TOOL_FIELDS.keys()
_OF_OUTPUTS = {"name", "namespace"}
_IN_PLACES: dict[str, tuple[Collection[str], Collection[str]]] = {
    "chat messages": (
        {"role", "content", "tool_calls", "function_call", "refusal", *chat.MESSAGE_TEXTS},
        chat.MESSAGE_NOTES,
    ),
    "chat roles": (OPENAI["chat roles"].split(), ()),
    "chat parts": (chat.TEXT_PARTS.keys() | chat.IMAGE_PARTS.keys(), ()),
    "chat parts of type text": ({"type", "text"}, {"prompt_cache_breakpoint"}),
    "chat parts of type image_url": ({"type", "image_url"}, chat.IMAGE_NOTES),
    "chat tool_calls": ({"id", "type", "function", "custom"}, chat.MESSAGE_NOTES),
    "chat tools": ({"function", "custom"}, ()),
    "chat tools of type function": (chat_tools.FUNCTION_FIELDS, chat_tools.UNREAD_TOOL_FIELDS),
    "chat tool_choice": ({"function", "custom", "allowed_tools"}, ()),
    "chat response_format": ({"text", "json_object", "json_schema"}, ()),
    "chat stream_options": ({"include_usage"}, ()),
    "items": (response_input.ITEM_FIELDS.keys() | {"item_reference"}, response_input.HOSTED_ITEMS),
    "parts": (response_input.PART_TEXTS.keys() | {"input_image"}, ()),
    "tools": (response_input.TOOL_FIELDS, _HOSTED_TOOLS),
    "tool_choice": ({"function", "custom", "allowed_tools"}, ()),
    "include": ({responses.LOGPROBS, responses.ENCRYPTED}, responses.ABSENT),
    "reasoning": (responses.REASONING_FIELDS - responses.SUMMARY_FIELDS - {"mode"}, responses.SUMMARY_FIELDS),
    "text": ({"format"}, {"verbosity"}),
    "stream_options": ((), ()),
    **{
        f"items of type {kind}": (
            fields - (_OF_OUTPUTS if kind.endswith("_output") else {"summary"}),
            {*response_input.UNREAD_ITEM_FIELDS, "summary", *_OF_OUTPUTS},
        )
        for kind, fields in response_input.ITEM_FIELDS.items()
    },
    **{
        f"parts of type {kind}": ({"type", "text"}, response_input.UNREAD_PART_FIELDS)
        for kind in ("input_text", "output_text")
    },
    "parts of type input_image": ({"type", "image_url"}, chat.IMAGE_NOTES),
    **{
        f"tools of type {kind}": (fields - response_input.UNREAD_TOOL_FIELDS, response_input.UNREAD_TOOL_FIELDS)
        for kind, fields in response_input.TOOL_FIELDS.items()
    },
}
"""By place: names that are read, and names without an effect."""
_ONLY = {
    ("chat stream_options", "include_obfuscation"): "only `false`",
    ("stream_options", "include_obfuscation"): "only `false`",
    ("reasoning", "mode"): 'only `"standard"`',
}
"""Names that pass with one value, which has no effect."""
COLUMNS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chats",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/pooling": "pooling",
    "/classify": "classes",
    "/v1/score": "scores",
    "/v1/rerank": "ranks",
    "/tokenize": "tokenize",
}


def policy(path: str, name: str) -> str:
    """Return what a path does with a field of vLLM, as a cell; "" if vLLM's path does not have it."""
    if name not in FIELDS[path].split():
        return ""
    if name in OWN[path]:
        return "yes"
    return _neutral(neutral_fields(path)[name])


def _neutral(row: Neutral) -> str:
    if row.types:
        return "no effect"
    return f"only {' or '.join(f'`{_json(value)}`' for value in row.values)}" if row.values else "refused"


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def openai_policy(place: str, name: str) -> str:
    """Return what the server does with a name of OpenAI's package: "yes", "refused", or as in `policy`."""
    if place in OWN:
        return "yes" if name in OWN[place] or name == "model" else _neutral(neutral_fields(place)[name])
    if (place, name) in _ONLY:
        return _ONLY[place, name]
    read, unread = _IN_PLACES[place]
    return "yes" if name in read else "no effect" if name in unread else "refused"


def openai_table(path: Path) -> str:
    """Return the table of the names of OpenAI's package on a page: a row for each place."""
    is_chat = path == PAGE
    places = [place for place in OPENAI if is_chat == (place in OWN or "chat" in place) or place == "/v1/responses"]
    if is_chat:
        places.remove("/v1/responses")
    return "\n".join(_lines_of_package("openai", OPENAI_VERSION, places, OPENAI, openai_policy)) + "\n"


def anthropic_policy(place: str, name: str) -> str:
    """Return what /v1/messages does with a name of Anthropic's package: "yes", "refused", or as in `policy`."""
    if name in anthropic.WITHOUT_EFFECT.get(place, ()):
        return "no effect"
    if place == "body":
        known = name in anthropic.OF_MESSAGES or name == "model"
        return "yes" if known else _neutral(neutral_fields(anthropic.MESSAGES_URL)[name])
    return "yes" if name in anthropic.NAMES[place] else "refused"


def anthropic_table() -> str:
    """Return the table of the names of Anthropic's package: a row for each place."""
    return "\n".join(_lines_of_package("anthropic", ANTHROPIC_VERSION, ANTHROPIC, ANTHROPIC, anthropic_policy)) + "\n"


def _lines_of_package(
    package: str, version: str, places: Iterable[str], names: Mapping[str, str], policy_in: Callable[[str, str], str]
) -> Iterator[str]:
    yield f"\n| in {package} {version} | read | no effect | refused |\n|---|---|---|---|"
    for place in places:
        cells: dict[str, list[str]] = {"yes": [], "no effect": [], "refused": []}
        for name in names[place].split():
            told = policy_in(place, name)
            is_limited = told.startswith("only ")
            cells["no effect" if is_limited else told].append(f"`{name}`" + (f" ({told})" if is_limited else ""))
        is_block = package == "anthropic" and not place.startswith(("body", "blocks"))
        title = f"blocks of type {place}" if is_block else f"`{place}`" if place.startswith("/") else place
        yield f"| {title} | {' | '.join(', '.join(some) for some in cells.values())} |"
    yield ""


def table() -> str:
    """Return the table: a row for all fields with the same policies."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for path in COLUMNS for name in FIELDS[path].split()}):
        groups.setdefault(tuple(policy(path, name) for path in COLUMNS), []).append(name)
    yield f"\n| field of vLLM {VERSION} | {' | '.join(COLUMNS.values())} |\n|{'---|' * (1 + len(COLUMNS))}"
    for cells, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |"
    yield ""


def page(path: Path = PAGE) -> str:
    """Return a page with the current tables."""
    text = path.read_text()
    if path != RESPONSES_PAGE:
        text = _with_table(text, BEGIN, table() if path == PAGE else anthropic_table())
    return text if path == ANTHROPIC_PAGE else _with_table(text, OPENAI_BEGIN, openai_table(path))


def _with_table(text: str, begin: str, current: str) -> str:
    start = text.index(begin) + len(begin)
    return f"{text[:start]}{current}{text[text.index(END, start) :]}"


if __name__ == "__main__":
    for one in (PAGE, RESPONSES_PAGE, ANTHROPIC_PAGE):
        one.write_text(page(one))
