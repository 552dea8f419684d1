"""The values that cross layers: what a caller asks for and what comes back. Frozen; no jax, no grpc.

One type for each hop of a request: `SamplingParams` and a prompt become a `Request` (validated, tokenised), the engine
answers with `OutputEvent`s, and the offline face folds those into a `RequestOutput`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard

from jpaged.chat import ChatOptions
from jpaged.errors import InvalidArgument

MAX_LOGPROBS = 20
"""Most top log-probabilities that a request may ask for at each position."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 32
MAX_SEED = 2**64 - 1
MAX_NUM_SAMPLES = 256
MAX_BEAM_WIDTH = 16
"""The device reports the 32 likeliest tokens of a row, and a beam needs twice its width."""
MAX_CACHE_SALT_CHARS = 256
MAX_CHAT_MESSAGES = 8192
MIN_MAX_CHAT_BYTES = 1 << 20
"""Roles and contents of a conversation may have so many bytes, also where a prompt may not: templates drop parts."""
MIN_MAX_TOKENIZE_BYTES = 256 << 10
"""Texts that Tokenize takes, also where a prompt may not be as long."""
MAX_DETOKENIZE_IDS = 256 << 10
_MAX_SHOWN = 80
"""Characters of a value in an error."""


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` were generated."""
    ABORT = "abort"
    """The request was aborted by id."""


def require_whole_characters(field: str, text: str) -> None:
    """Refuses a string that no UTF-8 is: bytes of a command line that are none, or halves of characters from JSON.

    Raises:
        InvalidArgument: names the field, and where in the text it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"is not UTF-8: {text[error.start]!a} at character {error.start}") from error


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        shown = f"{value[:_MAX_SHOWN]!r}... ({len(value)} characters)" if _is_long(value) else repr(value)
        raise InvalidArgument(f"sampling.{name}", f"{shown} is out of range: must be {limit}")


def _is_long(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) > _MAX_SHOWN


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def param(default: Any, help: str) -> Any:
    """A field of SamplingParams: its default, and what the command line says about it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence stops. Values out of range raise `InvalidArgument`."""

    max_tokens: int = param(16, "tokens to generate at most, >= 1")
    min_tokens: int = param(
        0, "end-of-sequence and stop tokens are impossible before so many tokens; 0 <= min_tokens <= max_tokens"
    )
    temperature: float = param(1.0, "0 is greedy; otherwise logits are divided by it, up to 100")
    top_k: int = param(0, "keep the k likeliest tokens; 0 or -1 keeps all")
    top_p: float = param(1.0, "keep the smallest set of likeliest tokens whose probability reaches top_p; in (0, 1]")
    min_p: float = param(0.0, "drop tokens less likely than min_p times the likeliest; in [0, 1]")
    seed: int | None = param(
        None,
        "the noise of this request is a function of (seed, sequence index, position) alone; None samples a seed from "
        "the engine's",
    )
    logprobs: int | None = param(
        None,
        "also report this many likeliest tokens at each position (0 to 20; 0 reports the chosen one alone). "
        "Log-probabilities are of the model's own distribution, before temperature and truncation",
    )
    stop: Sequence[str] = param((), "texts that end the sequence; none of their characters is ever sent")
    stop_token_ids: Sequence[int] = param(
        (), "tokens that end the sequence; the token itself is reported, its text is not"
    )
    ignore_eos: bool = param(False, "go on past the model's own end-of-sequence tokens")
    skip_special_tokens: bool = param(True, "leave special tokens out of the text")
    detokenize: bool = param(True, "False makes no text, only token ids: every text is empty")
    n: int = param(1, "sequences to return. The prompt is computed once and its blocks are shared")
    best_of: int | None = param(
        None,
        "sequences to generate, of which the n with the highest cumulative log-probability are returned, the best "
        "first; None is n. With best_of above n nothing is streamed before the end",
    )
    beam_width: int | None = param(
        None,
        "search for the likeliest sequences with this many beams instead of sampling; None or 0 samples. The n best "
        "are returned at the end. Temperature, top_k, top_p, min_p, seed and best_of have no part in it and must "
        "be left at their defaults (a temperature of 0 is accepted); stop strings are not searched for",
    )
    length_penalty: float = param(
        1.0, "a finished beam's score is its cumulative log-probability / length ** length_penalty"
    )
    early_stopping: bool | Literal["never"] = param(
        False,
        "True ends the search as soon as beam_width sequences are finished; False when the best running beam, at "
        'its length, no longer beats the worst finished one; "never" when it cannot at any length',
    )
    priority: int = param(0, "lower numbers are served first, under the policy `priority`")
    cache_salt: str = param("", "sequences share cached prefixes only with those of the same salt")
    use_prefix_cache: bool = param(True, "False neither reads cached prefixes nor leaves any")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_counts()
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_lengths()
        self._check_distribution()
        self._check_stops()
        self._check_sequences()
        self._check_sharing()

    def _check_lengths(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens ({self.max_tokens})",
        )

    def _check_distribution(self) -> None:
        for name, low, high, limit in (
            ("temperature", 0.0, 100.0, "from 0 to 100"),
            ("top_p", math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
            ("min_p", 0.0, 1.0, "from 0 to 1"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(is_number and low <= value <= high, name, value, f"a number {limit}")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for all")
        if self.seed is not None:
            _require(_is_int(self.seed) and 0 <= self.seed <= MAX_SEED, "seed", self.seed, f"from 0 to {MAX_SEED}")
        if self.logprobs is not None:
            is_ok = _is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS
            _require(is_ok, "logprobs", self.logprobs, f"from 0 to {MAX_LOGPROBS}")

    def _check_counts(self) -> None:
        """Checks the lengths of lists, before anything is copied."""
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, f"at most {MAX_STOP_TOKEN_IDS} ids")

    def _check_stops(self) -> None:
        for text in self.stop:
            is_ok = isinstance(text, str) and 1 <= len(text) <= MAX_STOP_STRING_CHARS
            _require(is_ok, "stop", text, f"a string of 1 to {MAX_STOP_STRING_CHARS} characters")
            require_whole_characters("sampling.stop", text)
        _require(isinstance(self.detokenize, bool), "detokenize", self.detokenize, "true or false")
        if not self.detokenize:
            _require(not self.stop, "stop", self.stop, "empty where detokenize is false: they are found in the text")
        for token_id in self.stop_token_ids:
            _require(_is_int(token_id) and token_id >= 0, "stop_token_ids", token_id, "token ids >= 0")

    def _check_sequences(self) -> None:
        is_ok = _is_int(self.n) and 1 <= self.n <= MAX_NUM_SAMPLES
        _require(is_ok, "n", self.n, f"an integer from 1 to {MAX_NUM_SAMPLES}")
        if self.best_of is not None:
            is_ok = _is_int(self.best_of) and self.n <= self.best_of <= MAX_NUM_SAMPLES
            _require(is_ok, "best_of", self.best_of, f"an integer from n ({self.n}) to {MAX_NUM_SAMPLES}")
        is_number = isinstance(self.length_penalty, int | float) and abs(self.length_penalty) <= 100
        _require(is_number, "length_penalty", self.length_penalty, "-100 to 100")
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(is_known, "early_stopping", self.early_stopping, 'True, False or "never"')
        if not self.beam_width:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                value = getattr(self, name)
                _require(value == default, name, value, f"{default} unless beam_width is set")
            _require(self.beam_width in (None, 0), "beam_width", self.beam_width, f"from 0 to {MAX_BEAM_WIDTH}")
            return
        is_ok = _is_int(self.beam_width) and 1 <= self.beam_width <= MAX_BEAM_WIDTH
        _require(is_ok, "beam_width", self.beam_width, f"an integer from 0 to {MAX_BEAM_WIDTH}")
        _require(self.n <= self.beam_width, "n", self.n, f"at most beam_width ({self.beam_width})")
        _require(self.temperature in (0.0, 1.0), "temperature", self.temperature, "0 or 1 with beam_width")
        unused: dict[str, object] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "best_of": None}
        for name, unset in unused.items():
            value = getattr(self, name)
            _require(value == unset, name, value, f"{unset} with beam_width, which samples nothing")
        _require(not self.stop, "stop", self.stop, "empty with beam_width; use stop_token_ids")

    def _check_sharing(self) -> None:
        is_ok = _is_int(self.priority) and -(2**31) <= self.priority < 2**31
        _require(is_ok, "priority", self.priority, "a 32-bit integer")
        is_ok = isinstance(self.cache_salt, str) and len(self.cache_salt) <= MAX_CACHE_SALT_CHARS
        _require(is_ok, "cache_salt", self.cache_salt, f"a string of at most {MAX_CACHE_SALT_CHARS} characters")
        require_whole_characters("sampling.cache_salt", self.cache_salt)
        is_bool = isinstance(self.use_prefix_cache, bool)
        _require(is_bool, "use_prefix_cache", self.use_prefix_cache, "true or false")

    @property
    def needs_logprobs(self) -> bool:
        """Log-probabilities are told, or sequences are ranked by them; what needs none is told no sum either."""
        return self.logprobs is not None or self.num_samples > self.n or bool(self.beam_width)

    @property
    def is_greedy(self) -> bool:
        """Nothing is sampled at random."""
        return self.temperature == 0.0 or bool(self.beam_width)

    def ending_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Every token that ends a sequence, for a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else eos_token_ids.union(self.stop_token_ids)

    @property
    def num_samples(self) -> int:
        """Sequences that are generated when nothing is searched for."""
        return self.best_of or self.n


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model as clients see it. `name` is what a request's model is held against; without adapters limits are 0."""

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to run on, as a caller sends it: exactly one is set."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    """As `jpaged.service.chat.messages` shows them."""
    chat_options: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    """With messages alone: tools, and variables of the chat template."""

    @property
    def size(self) -> int:
        """Characters or token ids."""
        return len(self.text or self.token_ids or ())


class Adapter(Protocol):
    """The matrices of an adapter (LoRA) in host memory. Opaque to all but those that read it and run it."""

    @property
    def num_bytes(self) -> int: ...


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

    @property
    def adapter_number(self) -> int:
        """The number of its adapter's load; 0 is none."""
        return 0 if self.adapter is None else self.adapter.number


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token; `rank` is 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What the model thought of one generated position: the chosen token, and the likeliest ones in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


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
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


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
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: str
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything that came of one request, as `LLM.generate` returns it.

    Attributes:
        times: of the engine that ran it; None from a server that does not tell them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    finished: bool = True
    times: RequestTimes | None = None
