"""Values that cross layers: requests and results. Frozen, except those created per token; no jax, no grpc.

A sequence may resume after tokens generated on another server, for example one that failed.
"""

from __future__ import annotations

import enum
import math
import time
from array import array
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from jpaged.chat import ChatOptions, GivenImage, ToolCall, ToolCallPiece
from jpaged.errors import InvalidArgument
from jpaged.sampling_params import SamplingParams
from jpaged.structured import Grammar, GrammarState, ThinkingBudget


@dataclass(frozen=True, slots=True)
class PriorOutput:
    """Tokens that one sequence of a request has generated, as a caller sends them.

    Attributes:
        token_ids: at least one.
        cumulative_logprob: the sum over them; 0 if not requested.
        has_finished: the sequence has finished; nothing is left to generate.
    """

    index: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float = 0.0
    has_finished: bool = False


@dataclass(frozen=True, slots=True)
class TextState:
    """Detokenizer state of a sequence after its tokens, as `jpaged.engine.output` keeps it.

    Attributes:
        window: context tokens for the next ones, then tokens that have no text yet.
        num_read: how many tokens of the window are context.
        text_read: the text of the context.
        held: text that may be the beginning of a stop string.
    """

    window: tuple[int, ...] = ()
    num_read: int = 0
    text_read: str = ""
    held: str = ""


@dataclass(frozen=True, slots=True)
class ResumedSequence:
    """A sequence that resumes, or one that has finished and is only counted.

    Attributes:
        shown: the text already sent for its tokens.
        text: detokenizer state, with text not sent yet.
        grammar: grammar state after its tokens; None without a grammar.
    """

    generated: PriorOutput
    shown: str = ""
    text: TextState = TextState()
    grammar: GrammarState | None = None


MAX_CHAT_MESSAGES = 8192
MIN_MAX_CHAT_BYTES = 1 << 20
"""Minimum limit of a conversation's bytes, even for short prompts: templates may drop parts."""
MIN_MAX_TOKENIZE_BYTES = 256 << 10
"""Minimum limit of a text for Tokenize, even if prompts must be shorter."""
MAX_DETOKENIZE_IDS = 256 << 10


Pooling = Literal["last", "mean", "all", "cls", "max", "weightedmean", "mean_sqrt_len_tokens"]
"""How a prompt's hidden states become one vector: that of the last token, or the mean of all. "all" keeps every one.

The others are those of encoders, by the names of sentence-transformers: "cls" takes the first token, "max" the largest
value in each dimension; "weightedmean" weights the n-th token by n, and "mean_sqrt_len_tokens" divides the sum by the
root of the number of tokens.
"""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class FinishReason(enum.Enum):
    """Reason why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` tokens were generated."""
    ABORT = "abort"
    """The request was aborted by id."""
    TOOL_CALLS = "tool_calls"
    """As STOP, for a chat answer that calls tools; set by the chat parser, never by the engine."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the model, as clients see them. Limits are 0 without adapters.

    Attributes:
        name: name that a request's model must equal, unless it is one of the aliases.
        tool_call_parser: format of tool calls; "" if unknown.
        reasoning_parser: format of reasoning; "" if unknown.
        max_logprobs: maximum top log-probabilities per position; -1 for the full vocabulary.
        lossy_kv_window: StreamingLLM: number of recent tokens visible to each token, in addition to the sinks; 0 for
            all.
        lossy_kv_sinks: StreamingLLM: number of first tokens that stay visible.
        default_sampling: fields of SamplingParams and their values for requests that leave them out: those of the
            checkpoint's generation config.
        aliases: further names of the model.
        state_bytes_per_sequence: bytes of the recurrent state of a sequence, all layers; 0 without recurrent layers.
        weight_version: version of the weights; "0" until the first update.
        max_images: maximum number of images in a request; 0 if the model reads only text, and so is max_image_pixels.
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
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    state_bytes_per_sequence: int = 0
    weight_version: str = "0"
    max_images: int = 0
    max_image_pixels: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """Input embeddings of successive positions of a prompt.

    Attributes:
        start: the first position.
        values_te: float32 `[tokens, width]`, never written again.
        digest: of the image whose rows they are; empty for embeddings that a caller sends.
        first_row: row of the image at the first position.
        rope_grid: rows and columns of an image whose positions in rotary embedding are those; None for positions of
            text.
    """

    start: int
    values_te: NDArray[np.float32]
    digest: bytes = b""
    first_row: int = 0
    rope_grid: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.values_te)


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """The positions of a prompt whose input is an embedding. Their token ids are placeholders: 0, or that of images.

    Attributes:
        spans: in order, without overlaps.
        block_digests: digests of the embeddings in each block of the prompt; empty for a block that has none.
        num_image_tokens: tokens of images, with those between their rows.
    """

    spans: tuple[EmbeddedSpan, ...]
    block_digests: tuple[bytes, ...]
    num_image_tokens: int = 0

    def iter_rows(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the embeddings from position `start` to `stop`, each part with its first position."""
        for span in self.spans:
            begin, end = max(start, span.start), min(stop, span.stop)
            if begin < end:
                yield begin, span.values_te[begin - span.start : end - span.start]

    def end_outside(self, start: int, stop: int) -> int:
        """Return the last position up to `stop` at which a chunk from `start` may end: not inside a span."""
        inside = (span.start for span in self.spans if span.start < stop < span.stop)
        return max(start, next(inside, stop))

    @property
    def rope_shift(self) -> int:
        """Positions that rotary embedding skips in all spans: an image advances it by its longer side."""
        grids = (span.rope_grid for span in self.spans)
        return sum(rows * columns - max(rows, columns) for rows, columns in filter(None, grids))

    def hide(self, token_ids: Sequence[int], hidden: int = -1) -> list[int]:
        """Return the tokens of a sequence with another id in place of the placeholders."""
        found = list(token_ids)
        for span in self.spans:
            found[span.start : span.stop] = [hidden] * len(span.values_te)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """An image as a model's image processor prepares it, in host memory.

    Attributes:
        patches_pe: float32 `[patches, numbers of a patch]`, normalized, in the order of the model's encoder.
        grid: rows and columns of patches.
        token_ids: tokens that take the place of the image's placeholder in a prompt.
        is_embed_t: the tokens among them whose input is a row of the encoder's output, in order.
        digest: of the patches; a key of caches.
        rope_grid: as of `EmbeddedSpan`.
    """

    patches_pe: NDArray[np.float32]
    grid: tuple[int, int]
    token_ids: tuple[int, ...]
    is_embed_t: NDArray[np.bool_]
    digest: bytes
    rope_grid: tuple[int, int] | None = None


GivenEmbeds = NDArray[Any] | bytes | str


class EmbedsInput(TypedDict):
    """A prompt as input embeddings `[tokens, hidden_size]`: an array of NumPy or JAX, or a tensor of PyTorch."""

    prompt_embeds: Any


class ImagesInput(TypedDict):
    """A prompt as text with placeholders, and its images: `{"image": image}` or `{"image": [image, ...]}`."""

    prompt: str
    multi_modal_data: Mapping[str, Any]


EMBED_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Types of input embeddings, and the bytes of a number."""


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bfloat16 numbers, given as bits, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_host_array(embeds: Any) -> NDArray[Any]:
    """Return an array of NumPy or JAX, or a tensor of PyTorch, in host memory.

    NumPy cannot read bfloat16 tensors of PyTorch.

    Raises:
        InvalidArgument: it is no dense array.
    """
    try:
        detach = getattr(embeds, "detach", None)
        if detach is None:
            return np.asarray(embeds)
        tensor = detach().cpu()
        return np.asarray(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor)
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists, and sparse tensors
        raise InvalidArgument("prompt_embeds", f"is no dense array of numbers: {str(error)[:200]}") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a caller sends it: exactly one of text, token_ids, messages and embeds is set.

    Attributes:
        prompt_logprobs_start: first token whose log-probability is returned; None leaves it to
            `SamplingParams.prompt_logprobs`.
        pooling: return its hidden states, pooled this way.
        chat_options: options of messages: tools, tool choice, and variables of the chat template.
        generated: tokens that sequences of the request have generated on another server.
        fills_length: generate up to the limits of the model's length and the pool; `SamplingParams.max_tokens` is then
            the minimum that must fit.
        max_filled: with `fills_length`, the maximum to generate; None for no limit.
        add_special_tokens: add the tokenizer's special tokens to the text; messages have a separate option.
        truncation_side: side on which `SamplingParams.truncate_prompt_tokens` drops tokens.
        is_only_told: only prompt results are returned. The sampled token is dropped and needs no room, so the prompt
            may have `max_model_len` tokens.
        text_pair: second text of a pair, for a model that compares the two.
        pair_start: first token of the second text among token_ids, for models with token types.
        embeds: input embeddings `[tokens, width]` of any floating type; or a file of `torch.save`, or its base64 text.
        images: images of a text or token ids, whose placeholders they replace in order; messages have their own.
        prepared: the images, or those of the messages, after preparation.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    """In the format of `jpaged.service.chat.template`."""
    prompt_logprobs_start: int | None = None
    pooling: Pooling | None = None
    chat_options: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    generated: Sequence[PriorOutput] = ()
    fills_length: bool = False
    max_filled: int | None = None
    add_special_tokens: bool = True
    truncation_side: Literal["left", "right"] = "left"
    is_only_told: bool = False
    text_pair: str | None = None
    pair_start: int | None = None
    embeds: GivenEmbeds | None = field(default=None, compare=False)
    images: Sequence[GivenImage] = ()
    prepared: Sequence[PreparedImage] = field(default=(), compare=False)

    @property
    def size(self) -> int:
        """Number of characters, token ids or numbers."""
        if self.embeds is not None:
            return len(self.embeds) if isinstance(self.embeds, str | bytes) else self.embeds.size
        return len(self.text or self.token_ids or ()) + len(self.text_pair or ())


class Adapter(Protocol):
    """Matrices of an adapter (LoRA) in host memory; opaque except to the code that reads and runs them."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """32 bytes unique to these matrices; identify the keys computed with them, across processes."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedAdapter:
    """An adapter under a name. Any thread may call `fetch`.

    Attributes:
        path: source folder.
        number: number of this load, from 1; reloading the same name gives another number.
        matrices: None while they are not in host memory.
        read_again: starts to read the files again; None if the matrices never leave host memory.
        num_bytes: bytes of the matrices in host memory.
        digest: `Adapter.digest` of the matrices.
    """

    name: str
    path: str
    number: int
    matrices: Adapter | None = field(repr=False)
    read_again: Callable[[LoadedAdapter], Future[Adapter]] | None = field(default=None, repr=False)
    num_bytes: int = field(init=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Keep what the matrices are known by."""
        assert self.matrices is not None
        self.num_bytes, self.digest = self.matrices.num_bytes, self.matrices.digest

    def set_matrices(self, matrices: Adapter | None) -> None:
        """Put the matrices into host memory; None frees them there."""
        self.matrices = matrices

    def fetch(self) -> Future[Adapter]:
        """Return the matrices, once they are in host memory.

        The future has NotFound if the files cannot be read again, or have changed.
        """
        matrices = self.matrices
        if matrices is None:
            assert self.read_again is not None
            return self.read_again(self)
        fetched: Future[Adapter] = Future()
        fetched.set_result(matrices)
        return fetched


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for the requests of a call, loaded on first use.

    Attributes:
        lora_name: name of the adapter; an adapter that is loaded under this name from this path is used again.
        lora_int_id: number of the adapter, >= 1; another number under the same name loads the adapter again.
        lora_path: folder of the adapter in PEFT's format; "" for an adapter that is already loaded.
        base_model_name: has no effect.
        load_inplace: read the folder again, for requests from now on.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidArgument("lora_int_id", f"{self.lora_int_id!r} must be an integer >= 1")

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


class PackedTokens(tuple[int, ...]):
    """Token ids that are kept as bytes as well, so that hashing or checking them needs no loop over integers.

    Attributes:
        packed: the ids as int32, in the machine's byte order.
    """

    packed: bytes

    def __new__(cls, token_ids: Iterable[int], packed: bytes | None = None) -> PackedTokens:
        made = super().__new__(cls, token_ids)
        made.packed = array("i", made).tobytes() if packed is None else packed
        return made

    @classmethod
    def join(cls, parts: Iterable[PackedTokens]) -> PackedTokens:
        """Return the ids of several parts."""
        token_ids, packed = list[int](), list[bytes]()
        for part in parts:
            token_ids += part
            packed.append(part.packed)
        return cls(token_ids, b"".join(packed))


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the engine accepts it: tokenized, validated, with a seed.

    Attributes:
        prompt_token_ids: at least one token.
        prompt: the text of the ids; None if the caller sent ids.
        deadline_s: on the engine's clock; None for none.
        tenant: owner of the request, for the policy `fair`.
        cache_tenant: tenant whose cached prefixes it uses and extends; "" for the shared ones.
        is_non_streaming: non-streaming: each sequence is emitted as a whole when the request ends.
        adapter: the LoRA adapter; None for the base model.
        bad_word_ids: tokens of sampling.bad_words, in every form of each.
        prompt_logprobs_start: first prompt token whose log-probability is returned; None for none.
        pooling: return the prompt's hidden states, pooled this way.
        grammar: constraint of the text, from sampling.structured_outputs, and a thinking budget.
        thinking: the thinking budget; None for unlimited.
        continued: its sequences that resume after tokens generated on another server, or have finished there.
        is_encoded: an encoder computes it.
        pair_start: first token of the second text of a pair; None without one.
        embeds: embeddings in place of tokens of the prompt; None without any.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt: str | None = None
    deadline_s: float | None = None
    tenant: str = ""
    cache_tenant: str = ""
    is_non_streaming: bool = False
    adapter: LoadedAdapter | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs_start: int | None = None
    pooling: Pooling | None = None
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    continued: tuple[ResumedSequence, ...] = ()
    is_encoded: bool = False
    pair_start: int | None = None
    embeds: PromptEmbeds | None = field(default=None, compare=False)

    @property
    def prompt_logprob_positions(self) -> range:
        """Prompt positions whose hidden states are needed."""
        num_tokens = len(self.prompt_token_ids)
        if self.pooling is not None:
            return range(num_tokens - 1 if self.is_pooled_on_device else 0, num_tokens)
        return (
            range(0)
            if self.prompt_logprobs_start is None
            else range(max(1, self.prompt_logprobs_start) - 1, num_tokens - 1)
        )

    @property
    def is_pooled_on_device(self) -> bool:
        """True if the device returns one state for the prompt, at the last token."""
        return self.pooling is not None and (self.pooling == "last" or (self.is_encoded and self.pooling != "all"))

    @property
    def block_digests(self) -> tuple[bytes, ...]:
        """Digests of what else than tokens each block of the prompt has; empty for tokens only."""
        return () if self.embeds is None else self.embeds.block_digests

    @property
    def adapter_number(self) -> int:
        """Number of the request's adapter; 0 for none."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def adapter_digest(self) -> bytes:
        """Digest of the adapter's matrices; empty for none."""
        return b"" if self.adapter is None else self.adapter.digest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token; `rank` is 1 for the most likely.

    `decoded_token` is the token's text, set by `LLM`; None from a server.
    """

    token_id: int
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class PositionLogprobs(Mapping[int, TokenLogprob]):
    """Log-probabilities at one position: the actual token, the most likely in order, and the requested ones.

    Also a mapping from their token ids, with the actual token first, as in vLLM.

    Attributes:
        sampling_logprob: of the actual token in the distribution that it was sampled from, after temperature and
            truncation; None unless the request has `sampling_logprobs`, and so is `entropy`.
        entropy: of the model's distribution, in nats.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    asked: tuple[TokenLogprob, ...] = ()
    sampling_logprob: float | None = None
    entropy: float | None = None

    def as_dict(self) -> dict[int, TokenLogprob]:
        """Return the log-probabilities by token id."""
        return {one.token_id: one for one in (self.chosen, *self.top, *self.asked)}

    def __getitem__(self, token_id: int) -> TokenLogprob:
        return self.as_dict()[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __bool__(self) -> bool:
        return True

    def keys(self) -> KeysView[int]:
        """Return the token ids."""
        return self.as_dict().keys()

    def values(self) -> ValuesView[TokenLogprob]:
        """Return the log-probabilities."""
        return self.as_dict().values()

    def items(self) -> ItemsView[int, TokenLogprob]:
        """Return the token ids with their log-probabilities."""
        return self.as_dict().items()


# Values created for every token are not frozen: constructing a frozen one takes eight times as long, 4 us of an event.
# Only this package may write their fields all the same, like those of every class (tests/arch).
@dataclass(slots=True)
class Usage:
    """Token counts of one request so far; of the prompt, `cached_tokens` came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request's phases, in seconds of the engine's monotonic clock (the process's `time.monotonic`).

    On another machine only differences are meaningful: `first_token_s - arrival_s` is the time to first token, and the
    time per output token is `(last_token_s - first_token_s) / (tokens of a sequence - 1)`.

    Attributes:
        arrival_s: it was accepted and queued.
        first_scheduled_s: it entered its first step; None if it ended before that.
        first_token_s: the host had the first token of any sequence; None if there was none.
        last_token_s: the host had its last token.
        preempted_s: alternating start and end times of the first 32 preemptions.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    preempted_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """Finish of a sequence; `matched_stop` is the stop string or token id that ended it, if any."""

    reason: FinishReason
    matched_stop: str | int | None = None


class WeightVersionRun(NamedTuple):
    """Adjacent output tokens that were sampled with the same version of the weights."""

    version: str
    num_tokens: int


@dataclass(slots=True)
class SequenceDelta:
    """Addition of one event or message to one sequence of a request.

    Attributes:
        index: index of the sequence: 0 to n - 1.
        text: text to append to the sequence; may be empty even if token_ids is not.
        finish: set only in the sequence's last delta.
        cumulative_logprob: sum over all tokens of the sequence so far; None if `SamplingParams.needs_logprobs` is
            False.
        is_last: no delta of any sequence follows.
        times: set only with is_last; None from a server that does not report them.
        prompt_logprobs: log-probabilities of the prompt's tokens, from the second or the requested one on; sent before
            any token.
        embedding: the prompt's pooled hidden states, float32; sent before any token. The pooling "all" gives a view
            of one array, the hidden states of all tokens in order.
        reasoning_content: chats: reasoning to append; not part of `text`.
        tool_calls: chats: parts of calls, in order; not part of `text`.
        weight_versions: set only with `finish`: the versions that sampled all tokens of the sequence, in order; then,
            with 0 tokens, others that sampled beams or `best_of` sequences that it was ranked with.
        routed_experts: a part of those of `CompletionOutput`, in order; the last one comes with `finish`.
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
    embedding: tuple[float, ...] | memoryview = ()
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    weight_versions: tuple[WeightVersionRun, ...] = ()
    routed_experts: NDArray[Any] | None = field(default=None, compare=False)


@dataclass(slots=True)
class OutputEvent(SequenceDelta):
    """Delta of one engine step. `error` is set only on the last event, if the request failed."""

    error: Exception | None = None


def join_experts(parts: Iterable[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return `routed_experts` of all parts in order; None without any."""
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if len(found) > 1 else next(iter(found), None)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence of a request.

    Attributes:
        cumulative_logprob: sum over its tokens; None unless the request set `logprobs`, a best_of above n, or a beam
            width.
        logprobs: one entry per token, each also a mapping from token ids; None if not requested.
        finish_reason: "stop", "length", "abort" or "tool_calls"; None while a stream continues.
        matched_stop: stop string or token id that ended the sequence, if any.
        reasoning_content: chats: the reasoning; not part of `text`.
        tool_calls: chats: the calls; not part of `text`.
        lora_request: adapter of the request, as the caller of `LLM` gave it.
        weight_versions: versions of the weights that sampled the tokens, in order: one, unless the weights were updated
            while the request was kept. Versions of other beams, or samples of `best_of`, that it was ranked with have 0
            tokens. Empty while a stream continues, and from servers that do not report them.
        routed_experts: `[tokens, layers, top_k]`: the experts of each token of prompt and output, the best first, in
            unsigned integers; 0 in layers without experts. The last token has none, because it was not computed, and
            the first `routed_experts_prompt_start` ones are left out. None unless the engine returns them, while a
            stream continues, and if no token was computed.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    lora_request: LoRARequest | None = None
    weight_versions: tuple[WeightVersionRun, ...] = ()
    routed_experts: NDArray[Any] | None = field(default=None, compare=False)

    @property
    def weight_version(self) -> str:
        """The last version of `weight_versions`; "" if not reported."""
        return self.weight_versions[-1].version if self.weight_versions else ""

    @property
    def stop_reason(self) -> str | int | None:
        """`matched_stop`, by vLLM's name."""
        return self.matched_stop

    def finished(self) -> bool:
        """Return True if the sequence has ended."""
        return self.finish_reason is not None


_WALL_CLOCK_S = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class RequestStateStats:
    """Times of a request's phases, by vLLM's names: `arrival_time` in Unix seconds, `*_ts` on the monotonic clock.

    Attributes:
        first_token_latency: seconds from arrival to the first token; 0 if there was none.
    """

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float

    @classmethod
    def from_times(cls, times: RequestTimes, usage: Usage) -> RequestStateStats:
        """Return the times of a request; a phase that it did not reach has time 0."""
        arrival_s, first_s = times.arrival_s, times.first_token_s
        return cls(
            num_generation_tokens=usage.completion_tokens,
            arrival_time=arrival_s + _WALL_CLOCK_S,
            queued_ts=arrival_s,
            scheduled_ts=times.first_scheduled_s or 0.0,
            first_token_ts=first_s or 0.0,
            last_token_ts=times.last_token_s or 0.0,
            first_token_latency=0.0 if first_s is None else first_s - arrival_s,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one request, as `LLM.generate` returns it; of a stream, the result so far or what is new.

    Attributes:
        finished: False while a stream continues.
        times: times in the engine that ran it; None from a server that does not report them.
        prompt_logprobs: one entry per prompt token, None for the first; None if not requested.
        embedding: the pooled hidden states, if requested, as in `SequenceDelta`.
        error: why the request failed while the rest of the batch ran; `outputs` is then empty.
        lora_request: its adapter, as the caller of `LLM` gave it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    finished: bool = True
    times: RequestTimes | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    embedding: tuple[float, ...] | memoryview | None = None
    error: Exception | None = None
    lora_request: LoRARequest | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.usage.cached_tokens

    @property
    def kv_transfer_params(self) -> None:
        """None: a request names no blocks of another server; vLLM's field."""

    @property
    def encoder_prompt(self) -> None:
        """None: no model has an encoder and a decoder; vLLM's field."""

    @property
    def encoder_prompt_token_ids(self) -> None:
        """None, as `encoder_prompt`."""

    @property
    def weight_version(self) -> str:
        """The version of the weights that sampled the last tokens; "" if not reported."""
        return self.outputs[-1].weight_version if self.outputs else ""

    @property
    def metrics(self) -> RequestStateStats | None:
        """`times` by vLLM's names."""
        return None if self.times is None else RequestStateStats.from_times(self.times, self.usage)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of one continuation of a prompt.

    Attributes:
        tokens: log-probability of each token of the continuation, given the prompt and the tokens before it.
        is_greedy: every token is the most likely one at its position.
        usage: usage of the prompt with its continuation; 0 if not reported per continuation.
    """

    tokens: tuple[TokenLogprob, ...]
    is_greedy: bool
    usage: Usage = field(default_factory=Usage)

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return math.fsum(one.logprob for one in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the continuation."""
        return tuple(one.token_id for one in self.tokens)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of `Embedding.outputs`, by vLLM's names."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class Embedding:
    """A prompt as a vector: the model's pooled hidden states after the final norm, float32.

    Attributes:
        values: a vector of the model's width.
        request_id: set by `LLM`.
    """

    prompt_token_ids: tuple[int, ...]
    values: tuple[float, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str = ""

    @property
    def outputs(self) -> EmbeddingOutput:
        """The vector, by vLLM's name."""
        return EmbeddingOutput(list(self.values))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.usage.cached_tokens

    @property
    def finished(self) -> bool:
        """True."""
        return True
