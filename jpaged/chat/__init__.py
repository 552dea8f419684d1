"""Values of chats with tools: tools, calls, and answers in pieces. Neither jax nor grpc.

tools.py        tools, and the tool choice
options.py      options of a chat: everything except the messages
messages.py     messages of a conversation, parsed leniently
pieces.py       an answer in pieces, and assembled
json_bounds.py  limits of JSON from callers
"""

from jpaged.chat.json_bounds import (
    MAX_JSON_DEPTH,
    json_bytes,
    json_object,
)
from jpaged.chat.messages import MESSAGE_TEXTS, read_message, text_of_parts, without_surrogates
from jpaged.chat.options import (
    MAX_CHAT_TEMPLATE_BYTES,
    MAX_DOCUMENTS,
    MAX_DOCUMENTS_BYTES,
    MAX_TEMPLATE_KWARGS,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_THINKING_TOKEN_BUDGET,
    ChatOptions,
    ChatWords,
    ReasoningOptions,
    chat_options_of,
    reasoning_of,
)
from jpaged.chat.pieces import (
    ChatAnswer,
    ContentPiece,
    Piece,
    ReasoningPiece,
    ToolCall,
    ToolCallPiece,
)
from jpaged.chat.tools import (
    MAX_CALL_ID_CHARS,
    MAX_TOOL_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    is_tool_name,
    tool_choice_of,
    tools_of,
)

__all__ = [
    "MAX_CALL_ID_CHARS",
    "MAX_CHAT_TEMPLATE_BYTES",
    "MAX_DOCUMENTS",
    "MAX_DOCUMENTS_BYTES",
    "MAX_JSON_DEPTH",
    "MAX_TEMPLATE_KWARGS",
    "MAX_TEMPLATE_KWARGS_BYTES",
    "MAX_THINKING_TOKEN_BUDGET",
    "MAX_TOOLS",
    "MAX_TOOL_BYTES",
    "MAX_TOOL_CALLS",
    "MAX_TOOL_NAME_CHARS",
    "MESSAGE_TEXTS",
    "ChatAnswer",
    "ChatOptions",
    "ChatWords",
    "ContentPiece",
    "Piece",
    "ReasoningOptions",
    "ReasoningPiece",
    "Tool",
    "ToolCall",
    "ToolCallPiece",
    "ToolChoice",
    "ToolChoiceMode",
    "chat_options_of",
    "is_tool_name",
    "json_bytes",
    "json_object",
    "read_message",
    "reasoning_of",
    "text_of_parts",
    "tool_choice_of",
    "tools_of",
    "without_surrogates",
]
