"""Answers in a model family's own format -> pieces of content, reasoning and tool calls, while they come.

Every parser takes a text to the same pieces, put together, however it is cut, emits no character twice, and holds back
only what may still become a tag.

answer.py       one answer: reasoning first, then content and calls
tool_parser.py  what the families' parsers share: text up to a tag
call_object.py  a call as JSON, read as it comes
writer.py       pieces that wait to be taken
hermes.py       <tool_call>{...}</tool_call>: Hermes, Qwen
llama3_json.py  {"name": ..., "parameters": ...}: Llama 3
mistral.py      [TOOL_CALLS]: Mistral
harmony.py      channels: gpt-oss, its reasoning too
reasoning.py    <think>...</think>
formats.py      the formats by their names, and which one a chat template asks for
"""
