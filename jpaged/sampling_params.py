"""Parameters of requests, by vLLM's names: `SamplingParams`, `BeamSearchParams` and `PoolingParams`.

A value out of range raises an error on construction, and an assigned one when the parameters are used.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, InitVar, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeGuard

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.structured import ConstraintKind, StructuredOutputs, get_structured_outputs

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 32
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
"""Negative seeds are 64-bit two's complement."""
MAX_NUM_SAMPLES = 256
MAX_BEAM_WIDTH = 16
"""The device reports the 32 most likely tokens of a row, and a beam search needs twice its width."""
MAX_CACHE_SALT_CHARS = 256
MAX_TOP_LOGPROBS = 32
"""Maximum top log-probabilities that a sample returns."""
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROB_TOKEN_IDS = 128
MAX_THINKING_TOKENS = 2**31 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_TOP_N_SIGMA = 100.0
_MAX_SHOWN, _MAX_OBJECT = 80, 200
"""Maximum characters of a text in an error, and of another value."""


def require_whole_characters(field: str, text: str) -> None:
    """Reject a string that is not valid UTF-8 (undecodable command-line bytes, or unpaired surrogates from JSON).

    Raises:
        InvalidArgument: names the field, and the position in the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"is not UTF-8: {text[error.start]!a} at character {error.start}") from error


def text_bytes(field: str, text: str) -> int:
    """Return the size of a text in UTF-8 bytes.

    Raises:
        InvalidArgument: the text contains an unpaired surrogate.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidArgument(field, f"{text[at]!r} at {at} is half of a surrogate pair") from error


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine: a loopback address, an unspecified address, or localhost."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        shown = f"{value[:_MAX_SHOWN]!r}... ({len(value)} characters)" if _is_long(value) else repr(value)
        if len(shown) > _MAX_OBJECT:
            shown = f"{shown[:_MAX_OBJECT]}..."
        raise InvalidArgument(name, f"{shown} is out of range: must be {limit}")


def _is_long(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) > _MAX_SHOWN


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NO_EDITS: Mapping[str, object] = {
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "structured_outputs": None,
}
"""Fields that change logits, with their neutral values."""
_NOT_WITH_SAMPLING_LOGPROBS = {**_NO_EDITS, "min_tokens": 0, "thinking_token_budget": None}


_SAMPLING = "sampling."
"""Prefix of the fields in errors of requests."""


def with_python_name(error: Exception) -> Exception:
    """Return an error that names a field as in Python: `temperature` for `sampling.temperature` of requests."""
    if not isinstance(error, InvalidArgument) or not error.field.startswith(_SAMPLING):
        return error
    return type(error)(error.field.removeprefix(_SAMPLING), error.problem)


@contextlib.contextmanager
def python_names() -> Iterator[None]:
    """Name fields of sampling parameters in errors as `with_python_name`."""
    try:
        yield
    except InvalidArgument as error:
        if (named := with_python_name(error)) is error:
            raise
        raise named from None


def param(default: Any, help: str) -> Any:
    """Declare a field of SamplingParams: its default, and its command-line help."""
    return field(default=default, metadata={"help": help})


DEFAULT_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Fields of SamplingParams for which a checkpoint may have defaults."""

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields that a request sets by the checkpoint's defaults, except max_tokens.

    A beam search samples nothing, so it keeps the defaults of SamplingParams. Prompt.max_filled applies max_tokens,
    because a prompt may leave room for fewer.
    """
    if given.get("beam_width"):
        return dict(given)
    return {name: value for name, value in defaults.items() if name != "max_tokens"} | dict(given)


class RequestOutputKind(enum.Enum):
    """Content of each output of a stream: everything so far, what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_LOGITS_PROCESSORS = "use logit_bias, allowed_token_ids, bad_words, structured_outputs or a penalty"
_NOT_SUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "flat_logprobs": ((None, False), "log-probabilities are mappings from token ids"),
    "repetition_detection": ((None,), "use a penalty or a stop string"),
    "extra_args": ((None, {}), "plugins, which would read them, are not loaded"),
    "logits_processors": ((None, [], ()), f"code of a request does not run in the engine; {_LOGITS_PROCESSORS}"),
    "guided_decoding": ((None,), "use structured_outputs"),
    "prompt_logprob_token_ids": ((None,), "use prompt_logprobs"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs returns all positions"),
    "watermarking": ((None, False), "outputs are not watermarked"),
    "trace_decode_token_ids": ((None,), "use LLM.score_continuations for the log-probabilities of given tokens"),
}
"""Parameters of vLLM that would change the result: values without an effect, and the reason or an alternative."""


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters, stop conditions and other options of one request.

    Every field is checked on construction; a value out of range raises `InvalidArgument`, which names the field.
    Assigned values are checked when the parameters are used. None is the default of every field. Defaults: 16 tokens at
    temperature 1.0, one sequence.

    Keywords of vLLM without an effect here are accepted: `spaces_between_special_tokens`, `skip_clone` and
    `stream_interval`. `skip_reading_prefix_cache` turns `use_prefix_cache` off.

    Attributes:
        max_tokens: maximum tokens to generate per sequence, >= 1; None for what fits after the prompt.
        min_tokens: no end-of-sequence or stop token is sampled before this number of tokens.
        temperature: 0 is greedy; otherwise logits are divided by it, up to 100.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        typical_p: keep tokens whose information content is closest to the entropy, up to this probability; in (0, 1].
        top_n_sigma: keep tokens whose logits are within this many standard deviations of the maximum; 0 keeps all.
        presence_penalty: subtracted from the logits of generated tokens; -2 to 2.
        frequency_penalty: subtracted from a token's logit for each time it was generated; -2 to 2.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or output; up to
            100.
        logit_bias: token id -> number from -100 to 100 to add to its logit; at most 300 tokens.
        allowed_token_ids: the only tokens that may be sampled; None allows all.
        bad_words: texts that must not be generated; at most 128, of 256 characters each.
        structured_outputs: constraint of the text: JSON schema, regex, choice, grammar, JSON object or structural tag.
        seed: the sampling noise depends only on (seed, sequence index, position); None or -1 picks a seed.
        logprobs: number of top log-probabilities per position; 0 for the sampled token only, -1 for the full
            vocabulary.
        logprob_token_ids: tokens whose log-probabilities are also returned at each position, each once; at most 128.
        sampling_logprobs: also return each token's log-probability in the distribution that it was sampled from, after
            temperature and truncation, and the entropy of the model's distribution.
        prompt_logprobs: as logprobs, for the prompt's tokens.
        thinking_token_budget: maximum tokens of thinking, after which its closing tag is generated; those after the
            prompt's last opening tag count. None or -1 for no limit.
        truncate_prompt_tokens: keep only the last N prompt tokens; -1 keeps what fits into max_model_len.
        stop: texts that end a sequence; not part of the output.
        stop_token_ids: tokens that end a sequence; the token id is returned, its text is not.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the output.
        ignore_eos: continue after the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: if False, return only token ids; every text is empty.
        n: sequences to return. The prompt is computed once.
        best_of: sequences to generate; the n with the highest cumulative log-probability are returned. None for n.
        beam_width: use beam search with this width, at most 16; None or 0 samples.
        length_penalty: a finished beam's score is its cumulative log-probability / length ** length_penalty.
        early_stopping: when beam search ends: True once beam_width sequences have finished; False once the best running
            beam cannot win at its current length; "never" once it cannot win at any length.
        priority: lower values run first, under the scheduling policy `priority`.
        cache_salt: prefixes are shared only between requests with the same salt.
        use_prefix_cache: if False, neither use the prefix cache nor add to it.
        routed_experts_prompt_start: first prompt tokens that `routed_experts` leaves out, if the engine returns them.
        output_kind: content of each output of `AsyncLLM` and `LLMEngine`; not sent to a server.
    """

    max_tokens: int | None = param(16, "maximum number of tokens to generate, >= 1")
    min_tokens: int = param(
        0,
        "minimum number of tokens before an end-of-sequence or stop token may be sampled; 0 <= min_tokens <= "
        "max_tokens",
    )
    temperature: float = param(1.0, "sampling temperature, up to 100; 0 is greedy")
    top_k: int = param(0, "keep the k most likely tokens; 0 or -1 keeps all")
    top_p: float = param(
        1.0, "keep the smallest set of most likely tokens whose total probability reaches top_p; in (0, 1]"
    )
    min_p: float = param(0.0, "drop tokens less likely than min_p times the most likely one; in [0, 1]")
    typical_p: float = param(
        1.0,
        "keep the tokens whose information content is closest to the distribution's entropy, until their total "
        "probability reaches typical_p; in (0, 1]",
    )
    top_n_sigma: float = param(
        0.0, "keep tokens whose logits are within this many standard deviations of the largest; 0 keeps all, up to 100"
    )
    presence_penalty: float = param(0.0, "subtracted from the logits of tokens that were already generated; -2 to 2")
    frequency_penalty: float = param(
        0.0, "subtracted from the logits of tokens for each time they were generated; -2 to 2"
    )
    repetition_penalty: float = param(
        1.0,
        "positive logits of tokens in the prompt or output are divided by it, negative ones multiplied; above 0, "
        "up to 100",
    )
    logit_bias: Mapping[int, float] | None = param(
        None, "added to logits: a map from token ids (at most 300) to numbers from -100 to 100"
    )
    allowed_token_ids: Sequence[int] | None = param(None, "only these tokens can be sampled; None allows all")
    bad_words: Sequence[str] = param(
        (),
        "texts that must not be generated, with or without a leading space: at most 128, of up to 256 characters each",
    )
    structured_outputs: StructuredOutputs | None = param(
        None,
        "constrain the output: an object with one of json, regex, choice, grammar, json_object, structural_tag",
    )
    seed: int | None = param(
        None,
        "seed of this request: its random numbers depend only on (seed, sequence index, position); None or -1 "
        "draws a seed from the engine's; other negative seeds are read as unsigned 64-bit numbers",
    )
    logprobs: int | None = param(
        None,
        "number of most likely tokens to report per position, with log-probabilities: 0 reports only the chosen "
        "one, -1 all; limited by --max-logprobs (20). Log-probabilities are of the model's distribution before "
        "temperature and truncation",
    )
    logprob_token_ids: Sequence[int] = param(
        (), "token ids whose log-probabilities to report at each position: at most 32"
    )
    sampling_logprobs: bool = param(
        False,
        "also report each token's log-probability under the distribution that it was sampled from, after temperature "
        "and truncation, and the entropy of the model's distribution",
    )
    prompt_logprobs: int | None = param(
        None, "log-probabilities of the prompt's tokens, with this many most likely tokens per position; see logprobs"
    )
    truncate_prompt_tokens: int | None = param(
        None, "number of prompt tokens to keep, from the end; -1 keeps as many as max_model_len allows"
    )
    thinking_token_budget: int | None = param(
        None,
        "maximum tokens of thinking, after which its closing tag is generated; those after the prompt's last opening "
        "tag count. None or -1 for no limit",
    )
    stop: Sequence[str] = param((), "stop strings that end the sequence; they are never part of the output")
    stop_token_ids: Sequence[int] = param(
        (), "stop token ids that end the sequence; the token is reported, its text is not"
    )
    include_stop_str_in_output: bool = param(False, "keep the stop string or the text of the stop token in the output")
    ignore_eos: bool = param(False, "continue after end-of-sequence tokens")
    skip_special_tokens: bool = param(True, "omit special tokens from the text")
    detokenize: bool = param(True, "False returns only token ids: all texts are empty")
    n: int = param(1, "number of sequences to return; the prompt is computed once and its blocks are shared")
    best_of: int | None = param(
        None,
        "number of sequences to generate, of which the n with the highest cumulative log-probability are returned, "
        "best first; None is n. If best_of is above n, nothing is streamed before the end",
    )
    beam_width: int | None = param(
        None,
        "beam search with this many beams instead of sampling; None or 0 samples. The n best sequences are "
        "returned at the end. Temperature, top_k, top_p, min_p, seed and best_of have no effect and must be left "
        "at their defaults (temperature 0 is accepted); stop strings are ignored",
    )
    length_penalty: float = param(
        1.0, "score of a finished beam: cumulative log-probability / length ** length_penalty"
    )
    early_stopping: bool | Literal["never"] = param(
        False,
        "True: stop as soon as beam_width sequences are finished; False: when the best running beam, at its "
        'current length, cannot beat the worst finished one; "never": when it cannot at any length',
    )
    priority: int = param(0, "priority under the policy `priority`; lower numbers run first")
    cache_salt: str = param("", "share cached prefixes only with requests that have the same salt")
    use_prefix_cache: bool = param(True, "False: neither read nor write the prefix cache")

    routed_experts_prompt_start: int = param(
        0, "first prompt tokens to leave out of the returned experts, of servers with --enable-return-routed-experts"
    )
    _: KW_ONLY
    output_kind: RequestOutputKind = param(RequestOutputKind.CUMULATIVE, "content of each output of a stream")
    skip_reading_prefix_cache: InitVar[bool | None] = None
    spaces_between_special_tokens: InitVar[bool | None] = None
    skip_clone: InitVar[bool | None] = None
    stream_interval: InitVar[int | None] = None
    flat_logprobs: InitVar[bool | None] = None
    repetition_detection: InitVar[Any] = None
    extra_args: InitVar[Mapping[str, Any] | None] = None
    logits_processors: InitVar[Any] = None
    guided_decoding: InitVar[Any] = None
    prompt_logprob_token_ids: InitVar[Any] = None
    prompt_logprob_start: InitVar[int | None] = None
    watermarking: InitVar[bool | None] = None
    trace_decode_token_ids: InitVar[Sequence[int] | None] = None

    def __post_init__(
        self,
        skip_reading_prefix_cache: bool | None,
        _spaces: bool | None,
        _clone: bool | None,
        _interval: int | None,
        *unsupported: Any,
    ) -> None:
        for name, default in _DEFAULTS_OF_NONE:
            if getattr(self, name) is None:
                setattr(self, name, default)
        for (name, (neutral, instead)), value in zip(_NOT_SUPPORTED.items(), unsupported, strict=True):
            if value not in neutral:
                raise Unsupported(f"{name}: is not supported: {instead}")
        is_kind = isinstance(self.output_kind, RequestOutputKind)
        _require(is_kind, "output_kind", self.output_kind, "a RequestOutputKind")
        if skip_reading_prefix_cache:
            self.use_prefix_cache = False
        if isinstance(self.stop, str):
            self.stop = (self.stop,)
        if isinstance(self.bad_words, str):
            self.bad_words = (self.bad_words,)
        self._check_counts()
        self.logprob_token_ids = tuple(self.logprob_token_ids)
        self.stop = tuple(self.stop)
        self.bad_words = tuple(self.bad_words)
        if self.logit_bias is not None:
            self.logit_bias = dict(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = tuple(self.allowed_token_ids)
        self.stop_token_ids = tuple(self.stop_token_ids)
        self._check_lengths()
        self._check_distribution()
        self._check_penalties()
        self._check_tokens()
        self._check_stops()
        self._check_sequences()
        self._check_sharing()
        self._check_sampling_logprobs()

    @classmethod
    def from_request(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request, whose errors name fields as `sampling.temperature`."""
        try:
            return cls(**values)
        except InvalidArgument as error:
            raise type(error)(f"{_SAMPLING}{error.field}", error.problem) from None

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return the parameters with these values; None is the default of a field.

        Keys of `logit_bias` may be texts, as in JSON.
        """
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            numbers = {int(one) if isinstance(one, str) and one.isdecimal() else one: bias[one] for one in bias}
            values["logit_bias"] = numbers
        return cls(**values)

    def clone(self) -> SamplingParams:
        """Return a copy, after checking every field."""
        return replace(self)

    def with_seed(self, seed: int) -> SamplingParams:
        """Return the same parameters with another seed, from 0 to 2**64 - 1; the others need no second check."""
        copied = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            setattr(copied, name, getattr(self, name))
        copied.seed = seed
        return copied

    @property
    def max_num_tokens(self) -> int:
        """`max_tokens` of a request that the engine runs: a number, also if the caller set none."""
        assert self.max_tokens is not None
        return self.max_tokens

    def _check_lengths(self) -> None:
        most, least = self.max_tokens, self.min_tokens
        _require(most is None or (_is_int(most) and most >= 1), "max_tokens", most, "an integer >= 1")
        is_ok = _is_int(least) and least >= 0 and (most is None or least <= most)
        _require(is_ok, "min_tokens", least, f"an integer from 0 to max_tokens ({most})")

    def _check_distribution(self) -> None:
        for name, low, high, limit in (
            ("temperature", 0.0, 100.0, "from 0 to 100"),
            ("top_p", math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
            ("min_p", 0.0, 1.0, "from 0 to 1"),
            ("typical_p", math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
            ("top_n_sigma", 0.0, MAX_TOP_N_SIGMA, f"from 0 to {MAX_TOP_N_SIGMA:g}"),
        ):
            self._check_number(name, low, high, limit)
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for all")
        if self.seed is not None:
            is_ok = _is_int(self.seed) and MIN_SEED <= self.seed <= MAX_SEED
            _require(is_ok, "seed", self.seed, f"from {MIN_SEED} to {MAX_SEED}")
            self.seed = None if self.seed == -1 else self.seed % 2**64
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and value >= -1), name, value, "an integer >= 0, or -1 for all")
        kept = self.truncate_prompt_tokens
        is_ok = kept is None or (_is_int(kept) and (kept >= 1 or kept == -1))
        _require(is_ok, "truncate_prompt_tokens", kept, "an integer >= 1, or -1")
        budget = self.thinking_token_budget
        if budget is not None:
            limit = f"an integer from 0 to {MAX_THINKING_TOKENS}, or -1 for no limit"
            is_ok = _is_int(budget) and -1 <= budget <= MAX_THINKING_TOKENS
            _require(is_ok, "thinking_token_budget", budget, limit)
            self.thinking_token_budget = None if budget == -1 else budget

    def _check_number(self, name: str, low: float, high: float, limit: str) -> None:
        value = getattr(self, name)
        _require(_is_number(value) and low <= value <= high, name, value, f"a number {limit}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_number(name, -MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
        limit = f"above 0 and at most {MAX_REPETITION_PENALTY:g}"
        self._check_number("repetition_penalty", math.nextafter(0.0, 1.0), MAX_REPETITION_PENALTY, limit)

    def _check_tokens(self) -> None:
        given = self.structured_outputs
        if isinstance(given, Mapping):
            with python_names():
                self.structured_outputs = get_structured_outputs(given)
        elif given is not None:
            limit = "an object that has one of " + ", ".join(kind.value for kind in ConstraintKind)
            _require(isinstance(given, StructuredOutputs), "structured_outputs", given, limit)
        for token_id, bias in (self.logit_bias or {}).items():
            is_ok = _is_int(token_id) and token_id >= 0
            _require(is_ok, "logit_bias", token_id, "token ids >= 0 to numbers")
            is_ok = _is_number(bias) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
            _require(is_ok, f"logit_bias[{token_id}]", bias, f"a number from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
        for token_id in self.logprob_token_ids:
            _require(_is_int(token_id) and token_id >= 0, "logprob_token_ids", token_id, "token ids >= 0")
        if self.logprob_token_ids and self.logprobs == len(self.logprob_token_ids):  # redundant, as in vLLM
            self.logprobs = None
        self.logprob_token_ids = tuple(dict.fromkeys(self.logprob_token_ids))
        if self.logprob_token_ids:
            limit = "left out with logprob_token_ids, or their number"
            _require(self.logprobs is None, "logprobs", self.logprobs, limit)
        if self.allowed_token_ids is not None:
            _require(bool(self.allowed_token_ids), "allowed_token_ids", (), "at least one token id, or None for all")
            for token_id in self.allowed_token_ids:
                _require(_is_int(token_id) and token_id >= 0, "allowed_token_ids", token_id, "token ids >= 0")
        for word in self.bad_words:
            is_ok = isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS and bool(word.strip())
            _require(is_ok, "bad_words", word, f"a string of 1 to {MAX_BAD_WORD_CHARS} characters that is not blank")
            require_whole_characters("bad_words", word)

    def _check_counts(self) -> None:
        """Check the lengths of lists before anything is copied."""
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, f"at most {MAX_STOP_TOKEN_IDS} ids")
        num_ids = len(self.logprob_token_ids)
        _require(num_ids <= MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids", num_ids, f"at most {MAX_LOGPROB_TOKEN_IDS} ids")
        num_words = len(self.bad_words)
        _require(num_words <= MAX_BAD_WORDS, "bad_words", num_words, f"at most {MAX_BAD_WORDS} strings")
        if self.logit_bias is not None:
            is_mapping = isinstance(self.logit_bias, Mapping)
            _require(is_mapping, "logit_bias", self.logit_bias, "a mapping of token ids to numbers")
            num_biases = len(self.logit_bias)
            _require(num_biases <= MAX_LOGIT_BIASES, "logit_bias", num_biases, f"at most {MAX_LOGIT_BIASES} tokens")

    def _check_stops(self) -> None:
        for text in self.stop:
            is_ok = isinstance(text, str) and 1 <= len(text) <= MAX_STOP_STRING_CHARS
            _require(is_ok, "stop", text, f"a string of 1 to {MAX_STOP_STRING_CHARS} characters")
            require_whole_characters("stop", text)
        for name in ("detokenize", "include_stop_str_in_output"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        if not self.detokenize:
            _require(not self.stop, "stop", self.stop, "empty if detokenize is false: they are found in the text")
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
        unused: dict[str, object] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "best_of": None, **_NO_EDITS}
        unused["thinking_token_budget"] = None
        for name, unset in unused.items():
            value = getattr(self, name)
            _require(value == unset, name, value, f"{unset} with beam_width, which samples nothing")
        _require(not self.stop, "stop", self.stop, "empty with beam_width; use stop_token_ids")
        _require(not self.sampling_logprobs, "sampling_logprobs", True, "false with beam_width, which samples nothing")
        is_told = not self.needs_extra_logprobs
        name = "logprob_token_ids" if self.logprob_token_ids else "logprobs"
        _require(is_told, name, getattr(self, name), f"left out or at most {MAX_TOP_LOGPROBS} with beam_width")

    def _check_sharing(self) -> None:
        is_ok = _is_int(self.priority) and -(2**31) <= self.priority < 2**31
        _require(is_ok, "priority", self.priority, "a 32-bit integer")
        is_ok = isinstance(self.cache_salt, str) and len(self.cache_salt) <= MAX_CACHE_SALT_CHARS
        _require(is_ok, "cache_salt", self.cache_salt, f"a string of at most {MAX_CACHE_SALT_CHARS} characters")
        require_whole_characters("cache_salt", self.cache_salt)
        is_bool = isinstance(self.use_prefix_cache, bool)
        _require(is_bool, "use_prefix_cache", self.use_prefix_cache, "true or false")
        start = self.routed_experts_prompt_start
        _require(_is_int(start) and start >= 0, "routed_experts_prompt_start", start, "an integer from 0 on")

    def _check_sampling_logprobs(self) -> None:
        is_bool = isinstance(self.sampling_logprobs, bool)
        _require(is_bool, "sampling_logprobs", self.sampling_logprobs, "true or false")
        for name, unset in _NOT_WITH_SAMPLING_LOGPROBS.items() if self.sampling_logprobs else ():
            value = getattr(self, name)
            _require(value == unset, name, value, f"{unset} with sampling_logprobs")

    @property
    def has_logits_processors(self) -> bool:
        """True if a logits processor is needed, i.e. more than temperature, truncation, min_tokens and grammars."""
        return any(getattr(self, name) != unset for name, unset in _NO_EDITS.items() if name != "structured_outputs")

    @property
    def bans_tokens(self) -> bool:
        """True if some tokens may be forbidden by fields other than `structured_outputs`."""
        return bool(self.bad_words) or self.allowed_token_ids is not None or self.min_tokens > 0

    @property
    def needs_extra_logprobs(self) -> bool:
        """True if its tokens need log-probabilities beyond those that a sample returns."""
        return bool(self.logprob_token_ids) or self.sampling_logprobs or self.wants_full_vocab(self.logprobs)

    @property
    def returns_logprobs(self) -> bool:
        """True if outputs have log-probabilities of the generated tokens."""
        return self.logprobs is not None or bool(self.logprob_token_ids) or self.sampling_logprobs

    @staticmethod
    def wants_full_vocab(num_top: int | None) -> bool:
        """Return True if `num_top` log-probabilities require those of the full vocabulary."""
        return num_top is not None and (num_top < 0 or num_top > MAX_TOP_LOGPROBS)

    @property
    def needs_row_scheduling(self) -> bool:
        """True if its rows are scheduled individually in each step, outside of the persistent decode batch."""
        return self.has_logits_processors or self.needs_extra_logprobs or bool(self.beam_width)

    @property
    def needs_counts(self) -> bool:
        """True if the next token's logits depend on the earlier tokens."""
        return self.has_penalties or bool(self.bad_words)

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def needs_logprobs(self) -> bool:
        """True if log-probabilities are returned, or used for ranking; otherwise not even their sum is computed."""
        return self.returns_logprobs or self.num_samples > self.n or bool(self.beam_width)

    @property
    def is_greedy(self) -> bool:
        """True if sampling is deterministic without a seed: temperature 0 or beam search."""
        return self.temperature == 0.0 or bool(self.beam_width)

    def ending_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return every token that ends a sequence, for a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else eos_token_ids.union(self.stop_token_ids)

    @property
    def num_samples(self) -> int:
        """Number of sequences to generate without beam search."""
        return self.best_of or self.n


def request_fields() -> tuple[Field[Any], ...]:
    """Return the fields of SamplingParams that a request to a server has: all except `output_kind`."""
    return tuple(one for one in fields(SamplingParams) if one.name != "output_kind")


_DEFAULTS_OF_NONE = [(one.name, one.default) for one in fields(SamplingParams) if one.default is not None][1:]
"""Fields for which None is not a value of its own, and their defaults; not max_tokens, the first one."""

StructuredOutputsParams = StructuredOutputs


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Attributes:
        beam_width: number of beams, 1 to 16, and of sequences to return.
        max_tokens: maximum tokens to generate per sequence, >= 1.
        ignore_eos: continue after the model's end-of-sequence tokens.
        temperature: without an effect, as in vLLM: beams are ranked by the model's own log-probabilities.
        length_penalty: a score is the cumulative log-probability / length ** length_penalty.
        include_stop_str_in_output: keep the end-of-sequence token's text in the output.
        structured_outputs: as in SamplingParams.
        skip_special_tokens: as in SamplingParams.
        watermarking: None or False.
        allowed_token_ids: as in SamplingParams.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: Sequence[int] | None = None

    def to_sampling(self) -> SamplingParams:
        """Return the sampling parameters of a request with this search.

        Raises:
            InvalidArgument: a value is out of range.
        """
        is_ok = _is_int(self.beam_width) and 1 <= self.beam_width <= MAX_BEAM_WIDTH
        _require(is_ok, "beam_width", self.beam_width, f"an integer from 1 to {MAX_BEAM_WIDTH}")
        return SamplingParams(
            beam_width=self.beam_width,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.structured_outputs,
            skip_special_tokens=self.skip_special_tokens,
            watermarking=self.watermarking,
            allowed_token_ids=self.allowed_token_ids,
        )


POOLING_TASKS = ("embed", "token_embed")
"""What is computed from a prompt instead of text: one vector, or one for each token."""


def check_pooling_task(field: str, task: str) -> None:
    """Raise Unsupported for a task that no model has a head for; names the field."""
    if task not in (*POOLING_TASKS, "classify"):
        known = "'embed', 'token_embed' and 'classify'"
        raise Unsupported(f"{field}: {task!r} is not supported, only {known}: models have no other pooler")


@dataclass(slots=True)
class PoolingParams:
    """Parameters of `LLM.embed`, `LLM.encode` and `LLM.score`. Assigned values are checked when they are used.

    Attributes:
        use_activation: scale the vector to length 1; None for the default of the method.
        dimensions: keep only the first numbers of each vector, if the model supports it; None keeps all.
        truncate_prompt_tokens: keep only the last N prompt tokens; -1 keeps what fits into max_model_len.
        normalize: former name of use_activation.
        task: None, "embed", "token_embed" or "classify"; None for the task of the method.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name in ("use_activation", "normalize"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise InvalidArgument(f"pooling_params.{name}", f"{value!r} is not True, False or None")
        kept = self.truncate_prompt_tokens
        if not (kept is None or (_is_int(kept) and (kept >= 1 or kept == -1))):
            raise InvalidArgument(
                "pooling_params.truncate_prompt_tokens", f"{kept!r} is out of range: must be an integer >= 1, or -1"
            )
        if self.task is not None:
            check_pooling_task("pooling_params.task", self.task)
        if not (self.dimensions is None or (_is_int(self.dimensions) and self.dimensions >= 1)):
            raise InvalidArgument(
                "pooling_params.dimensions", f"{self.dimensions!r} is out of range: must be an integer >= 1"
            )

    def clone(self) -> PoolingParams:
        """Return a copy, after checking every field."""
        return replace(self)

    def is_normalized(self, default: bool) -> bool:
        """Return True if vectors have length 1; `default` applies if neither field is set."""
        given = self.normalize if self.use_activation is None else self.use_activation
        return default if given is None else given


def check_pooling(params: PoolingParams) -> PoolingParams:
    """Return a copy of pooling parameters, after checking every field: they may have been assigned.

    Raises:
        InvalidArgument, Unsupported: a value is invalid, or would have no effect; names the field.
    """
    if not isinstance(params, PoolingParams):
        raise InvalidArgument("pooling_params", f"{params!r} is not of type PoolingParams")
    return replace(params)


PROMPT_TOKENIZATION: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True, False),
    "truncation_side": ("left", "right"),
}
"""Keywords of tokenization that are fields of a prompt, and their values."""


def get_pooling(
    given: PoolingParams | None,
    truncate_prompt_tokens: int | None = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
) -> PoolingParams:
    """Return a checked copy of pooling parameters, with the truncation that other arguments of a call set.

    Raises:
        InvalidArgument: a value is invalid, or two of them differ.
        Unsupported: a keyword is not supported.
    """
    params = check_pooling(PoolingParams() if given is None else given)
    asked = {params.truncate_prompt_tokens, truncate_prompt_tokens}
    asked.add(get_sampling_changes(tokenization_kwargs).get("truncate_prompt_tokens"))
    asked -= {None}
    if len(asked) > 1:
        raise InvalidArgument("truncate_prompt_tokens", f"is given as {' and '.join(map(str, asked))}: give only one")
    return replace(params, truncate_prompt_tokens=asked.pop()) if asked else params


def refuse_processor_options(given: Any, field: str = "mm_processor_kwargs") -> None:
    """Raise Unsupported if options of an image processor are given."""
    if given:
        raise Unsupported(f"{field}: is not supported: images are prepared by the settings of the checkpoint")


def check_tokenization(tokenization_kwargs: object) -> Mapping[str, Any]:
    """Return keywords of tokenization; none if they are None.

    Raises:
        InvalidArgument: they are no mapping.
    """
    if tokenization_kwargs is None:
        return {}
    if not isinstance(tokenization_kwargs, Mapping):
        problem = f"{tokenization_kwargs!r:.80} of type {type(tokenization_kwargs).__name__} is no mapping of keywords"
        raise InvalidArgument("tokenization_kwargs", problem)
    return tokenization_kwargs


def get_sampling_changes(
    tokenization_kwargs: Mapping[str, Any] | None, cache_salt: str | None = None, priority: int | None = None
) -> dict[str, Any]:
    """Return the fields of the sampling parameters that other arguments of a call set.

    Raises:
        Unsupported: a keyword is not supported.
    """
    given = check_tokenization(tokenization_kwargs)
    changes = {name: value for name, value in given.items() if name not in PROMPT_TOKENIZATION}
    for name in changes:
        if name != "truncate_prompt_tokens":
            known = ", ".join((*PROMPT_TOKENIZATION, "truncate_prompt_tokens"))
            raise Unsupported(f"tokenization_kwargs.{name}: is not supported, only {known}")
    if cache_salt is not None:
        changes["cache_salt"] = cache_salt
    if priority is not None:
        changes["priority"] = priority
    return changes


def change_sampling(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with other values.

    Raises:
        InvalidArgument: one is out of range; named without `sampling.`.
    """
    with python_names():
        return replace(sampling, **changes)
