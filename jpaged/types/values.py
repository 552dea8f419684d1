"""The values that cross layers: what a caller asks for and what comes back. Frozen; no jax, no grpc.

One type for each hop of a request: `SamplingParams` and a prompt become a `Request` (validated, tokenised), the engine
answers with `OutputEvent`s, and the offline face folds those into a `RequestOutput`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jpaged.chat import ChatOptions, ToolCall, ToolCallPiece
from jpaged.structured import Grammar, ThinkingBudget
from jpaged.types.continued import Continued, Generated
from jpaged.types.sampling import SamplingParams

MAX_CHAT_MESSAGES = 8192
MIN_MAX_CHAT_BYTES = 1 << 20
"""Roles and contents of a conversation may have so many bytes, also where a prompt may not: templates drop parts."""
MIN_MAX_TOKENIZE_BYTES = 256 << 10
"""Texts that Tokenize takes, also where a prompt may not be as long."""
MAX_DETOKENIZE_IDS = 256 << 10


Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt make one vector: that of its last token, or the mean of all."""


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` were generated."""
    ABORT = "abort"
    """The request was aborted by id."""
    TOOL_CALLS = "tool_calls"
    """As STOP, of a chat's answer that calls tools; those who read answers say so, and never the engine."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model as clients see it. `name` is what a request's model is held against; without adapters limits are 0.

    Attributes:
        tool_call_parser: the format in which it writes tool calls; "" where none is known.
        reasoning_parser: the same of its reasoning.
        max_logprobs: likeliest tokens that a request may be told of at each position; -1 is all.
        lossy_kv_window: last tokens that every token sees beside the first ones, all others forgotten; 0 sees all.
        lossy_kv_sinks: first tokens that are seen beside the window.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    max_loras: int = 0
    max_lora_rank: int = 0
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    max_logprobs: int = 20
    lossy_kv_window: int = 0
    lossy_kv_sinks: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to run on, as a caller sends it: exactly one of text, token_ids and messages is set.

    Attributes:
        told_from: the first token whose log-probability is told; None leaves it to `SamplingParams.prompt_logprobs`.
        pooling: have its hidden states told, pooled so.
        chat_options: with messages alone: tools, how they are called, and variables of the chat template.
        generated: what sequences of the request have generated elsewhere.
        fills_length: as many tokens may follow as the model's length and the pool leave; `SamplingParams.max_tokens` is
            the least that must fit.
        max_filled: with `fills_length`, the most that may follow; None is no limit.
        is_only_told: the token that is generated is dropped and needs no room: a prompt may have
            `max_model_len` tokens.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    """As `jpaged.service.chat.messages` shows them."""
    told_from: int | None = None
    pooling: Pooling | None = None
    chat_options: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    generated: Sequence[Generated] = ()
    fills_length: bool = False
    max_filled: int | None = None
    is_only_told: bool = False

    @property
    def size(self) -> int:
        """Characters or token ids."""
        return len(self.text or self.token_ids or ())


class Adapter(Protocol):
    """The matrices of an adapter (LoRA) in host memory. Opaque to all but those that read it and run it."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """32 bytes that no other adapter has: what keys that it made are known by, in other processes too."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter under a name.

    Attributes:
        path: where it was read.
        number: of this load, from 1: what is read anew under the same name has another.
    """

    name: str
    path: str
    number: int
    matrices: Adapter = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes."""
        return self.matrices.num_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the engine takes it: tokenised, validated, its seed settled.

    Attributes:
        prompt_token_ids: at least one token.
        prompt: the text the ids came from; None when the caller sent ids.
        deadline_s: on the engine's clock; None means none.
        tenant: whose request it is, for the policy `fair`.
        cache_tenant: whose cached prefixes it may use, and leaves; "" is everybody who is no tenant.
        is_whole: nobody reads along: each sequence is told whole when the request ends, and nothing before.
        adapter: what is added to the model's matrices; None is nothing.
        bad_word_ids: the tokens of sampling.bad_words, each in every form that it has.
        told_from: the first token of the prompt whose log-probability is told; None tells of none.
        pooling: the hidden states of the prompt are told, pooled so.
        grammar: what its text follows: sampling.structured_outputs, and a budget of thinking.
        thinking: the budget; None is no bound.
        continued: its sequences that go on behind tokens that were generated elsewhere, or have ended there.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt: str | None = None
    deadline_s: float | None = None
    tenant: str = ""
    cache_tenant: str = ""
    is_whole: bool = False
    adapter: LoadedAdapter | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    told_from: int | None = None
    pooling: Pooling | None = None
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    continued: tuple[Continued, ...] = ()

    @property
    def told_positions(self) -> range:
        """Positions of the prompt whose hidden states are asked of."""
        num_tokens = len(self.prompt_token_ids)
        if self.pooling is not None:
            return range(num_tokens - 1 if self.pooling == "last" else 0, num_tokens)
        return range(0) if self.told_from is None else range(max(1, self.told_from) - 1, num_tokens - 1)

    @property
    def adapter_number(self) -> int:
        """The number of its adapter's load; 0 is none."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def adapter_digest(self) -> bytes:
        """The digest of its adapter's matrices; empty for none."""
        return b"" if self.adapter is None else self.adapter.matrices.digest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token; `rank` is 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What the model thought of one position: the token that is there, the likeliest in order, and those asked of."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    asked: tuple[TokenLogprob, ...] = ()


# Not frozen are the values that every token makes anew: a frozen one takes eight times as long, 4 us of an event. They
# are written here alone all the same, as every class's fields are (tests/arch).
@dataclass(slots=True)
class Usage:
    """Tokens of one request so far: `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request got where, in seconds of the engine's monotonic clock (`time.monotonic` of its process).

    On another machine only the differences mean anything: `first_token_s - arrival_s` is the time to the first token,
    and the time per token after it is `(last_token_s - first_token_s) / (tokens of a sequence - 1)`.

    Attributes:
        arrival_s: it was accepted, and queued.
        first_scheduled_s: it was put into its first step; None where it ended before that.
        first_token_s: the host had its first token, of any of its sequences; None where there was none.
        last_token_s: the host had its last token.
        preempted_s: from when, until when it was preempted, in turn, the first 32 times.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    preempted_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """How a sequence ended; `matched_stop` is the stop string or token id that ended it, if one did."""

    reason: FinishReason
    matched_stop: str | int | None = None


@dataclass(slots=True)
class SequenceDelta:
    """What one event or one message added to one sequence of a request.

    Attributes:
        index: which sequence: 0 to n - 1.
        text: to append to that sequence; may be empty while token_ids are not.
        finish: in the sequence's last delta alone.
        cumulative_logprob: the sum over all tokens of the sequence so far; None where that is not told: of requests
            whose `SamplingParams.needs_logprobs` is False.
        is_last: nothing follows, of any sequence.
        times: with is_last alone; None from a server that does not tell them.
        prompt_logprobs: of the prompt's tokens, from the second or the one that was asked for on; before any token.
        embedding: the prompt's pooled hidden states, float32; before any token.
        reasoning_content: to append to what the model thinks, which `text` is without: of chats.
        tool_calls: parts of calls, which `text` is without, in order: of chats.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None
    cumulative_logprob: float | None = None
    usage: Usage = field(default_factory=Usage)
    is_last: bool = False
    times: RequestTimes | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    embedding: tuple[float, ...] = ()
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()


@dataclass(slots=True)
class OutputEvent(SequenceDelta):
    """What one step added. `error` is set on the last event alone, when the request failed instead of finishing."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sequence of a request.

    Attributes:
        cumulative_logprob: the sum over its tokens; None unless the request asked for `logprobs`, had a best_of above n
            or searched with beams.
        reasoning_content: what the model thought, which `text` is without: of chats.
        tool_calls: what it called, which `text` is without: of chats.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: str
    matched_stop: str | int | None = None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything that came of one request, as `LLM.generate` returns it.

    Attributes:
        times: of the engine that ran it; None from a server that does not tell them.
        prompt_logprobs: a place for each token of the prompt, None for the first; None where they were not asked for.
        embedding: the pooled hidden states, where they were asked for.
        error: why the request failed while others of its batch ran; `outputs` is then empty.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    finished: bool = True
    times: RequestTimes | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    embedding: tuple[float, ...] | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """How likely one continuation of a prompt is.

    Attributes:
        tokens: of the continuation, each behind the prompt and those before it.
        is_greedy: each of them is the likeliest in its place.
        usage: of the prompt with its continuation; 0 where that is not told of each.
    """

    tokens: tuple[TokenLogprob, ...]
    is_greedy: bool
    usage: Usage = field(default_factory=Usage)

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(one.logprob for one in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the continuation."""
        return tuple(one.token_id for one in self.tokens)


@dataclass(frozen=True, slots=True)
class Embedding:
    """A prompt as a vector: the model's hidden states, float32, behind its last norm, pooled.

    Attributes:
        values: as many as the model is wide.
    """

    prompt_token_ids: tuple[int, ...]
    values: tuple[float, ...]
    usage: Usage = field(default_factory=Usage)
