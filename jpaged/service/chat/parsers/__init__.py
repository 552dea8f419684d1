"""Incremental parsers: answers in a model family's format -> pieces of content, reasoning and tool calls.

The concatenated pieces do not depend on how the text is split. A parser emits no character twice, and holds back only
text that may still become a tag.

answer.py       one answer: reasoning first, then content and calls
tool_parser.py  shared base of the families' parsers: text up to a tag
call_object.py  a call as JSON, read incrementally
writer.py       pieces that wait to be taken
hermes.py       <tool_call>{...}</tool_call>: Hermes, Qwen
llama3_json.py  {"name": ..., "parameters": ...}: Llama 3
mistral.py      [TOOL_CALLS]: Mistral
harmony.py      channels: gpt-oss, including its reasoning
reasoning.py    <think>...</think>
formats.py      the formats by name, and detection from a chat template
"""
