"""Runner of the harness's requests, independent of the harness: log-probabilities of pairs, and generated texts.

pairs     -> fitted to the model's length -> grouped by context -> one call per group -> a likelihood per pair
contexts  -> fitted, with the task's sampling                   -> one call each      -> a text, cut at its end

A task's generation_kwargs become `SamplingParams`. The keys are those of transformers' `generate` that tasks use, and
the fields of `SamplingParams`.
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md describes the options of tasks.

Options in --model_args select the model or server, the tokenization, and engine options. Texts are tokenized with the
harness's semantics, by the tokenizer that its `hf` model would use.
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md lists the requirements on a model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from jpaged.errors import InternalError, InvalidArgument
from jpaged.evaluation.backends import (
    ContinuationGroup,
    EvaluationBackend,
    Likelihood,
    Pair,
    TokenIds,
    by_pair,
    fitted,
    grouped,
)
from jpaged.llm import MakeBar
from jpaged.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, request_fields
from jpaged.types import RequestOutput, SamplingParams

_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The first one present is used."""
_STOP_NAMES = ("until", "stop")
_SAMPLING_ALIASES = {"num_beams": "beam_width", "min_new_tokens": "min_tokens"}
_SET_HERE = frozenset(
    (
        "max_tokens",
        "temperature",
        "stop",
        "detokenize",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "n",
        "best_of",
    )
)
_TAKEN = frozenset(one.name for one in request_fields()) - _SET_HERE


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Sampling parameters of one text, and the texts that end it, which may exceed what the engine supports."""

    sampling: SamplingParams
    until: tuple[str, ...]


def parse_generation_params(
    asked: Mapping[str, Any], *, max_tokens: int, eos_token_id: int | None, is_thinking: bool = False
) -> GenerationParams:
    """Parse the generation_kwargs of a task.

    Without `do_sample` a temperature above 0 samples. `do_sample: false` is greedy regardless of the temperature. The
    default temperature of a sampled text is 1.

    Args:
        max_tokens: default if the task has none.
        eos_token_id: the tokenizer's, which ends a text as the model's ending tokens do.
        is_thinking: the texts of `until` end the answer, not the thinking before it.

    Raises:
        InvalidArgument: a key is unknown, or a value out of range.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    limits = [given.pop(name) for name in _MAX_TOKENS_NAMES if name in given]
    until = _texts(given)
    stops = () if is_thinking or given.get("num_beams", 1) > 1 else until
    fields: dict[str, Any] = {
        "max_tokens": int(limits[0]) if limits else max_tokens,
        "temperature": _temperature(given.pop("do_sample", None), given.pop("temperature", None)),
        "skip_special_tokens": False,  # a special token may end the text
    }
    fields["stop"] = [text for text in stops if len(text) <= MAX_STOP_STRING_CHARS][:MAX_STOP_STRINGS]
    fields["detokenize"] = bool(fields["stop"])
    for name, value in given.items():
        own = _SAMPLING_ALIASES.get(name, name)
        if own not in _TAKEN:
            raise InvalidArgument(f"gen_kwargs.{name}", f"is unknown: must be one of {', '.join(sorted(_TAKEN))}")
        fields[own] = value
    if fields.get("beam_width") == 1:
        del fields["beam_width"]
    if eos_token_id is not None and not fields.get("ignore_eos"):
        fields["stop_token_ids"] = sorted({*fields.get("stop_token_ids", ()), eos_token_id})
    return GenerationParams(SamplingParams(**fields), until)


def seeded(sampling: SamplingParams, seed: int, place: int) -> SamplingParams:
    """Set the seed of a sampled text, from the seed of the task or the run and the text's index in the run."""
    if sampling.is_greedy or sampling.beam_width:
        return sampling
    digest = hashlib.sha256(f"{seed if sampling.seed is None else sampling.seed}/{place}".encode()).digest()
    return dataclasses.replace(sampling, seed=int.from_bytes(digest[:8], "little"))


def cut(text: str, until: Sequence[str]) -> str:
    """Cut a text at the first occurrence of each of these, one after the other."""
    for end in until:
        text = text.partition(end)[0]
    return text


def _texts(given: dict[str, Any]) -> tuple[str, ...]:
    texts: dict[str, None] = {}
    for name in _STOP_NAMES:
        value = given.pop(name, [])
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, list | tuple) or not all(isinstance(text, str) for text in many):
            raise InvalidArgument(f"gen_kwargs.{name}", f"{value!r} is neither a string nor a list of strings")
        texts.update(dict.fromkeys(text for text in many if text))
    return tuple(texts)


def _temperature(do_sample: object, temperature: object) -> float:
    if temperature is not None and not isinstance(temperature, int | float):
        raise InvalidArgument("gen_kwargs.temperature", f"{temperature!r} is not a number")
    if do_sample is None:
        return float(temperature or 0.0)
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else float(temperature)


_OPTION_ALIASES = {"pretrained": "model", "timeout": "timeout_s"}
_WITHOUT_EFFECT = ("batch_size", "max_batch_size", "device", "trust_remote_code")
"""Ignored options of the harness: the engine batches by itself, jax chooses devices, and remote code never runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Options of the harness model. Values out of range raise `InvalidArgument`.

    Attributes:
        model: argument of `jpaged.LLM`: a folder, a hub id, `demo`; `pretrained` is an alias.
        target: running server, HOST:PORT; exactly one of model and target is required.
        tokenizer: folder or hub id of the tokenizer, if it is not the model's.
        adapter: name of a LoRA adapter; for a server, one that it has loaded.
        max_length: maximum number of tokens that the model reads: longer contexts are cut at the beginning. None for
            the model's maximum.
        max_gen_toks: default number of tokens to generate.
        add_bos_token: None leaves special tokens at the start of texts to the tokenizer.
        prefix_token_id: token before texts without a context; None is the tokenizer's bos, or eos without one.
        enable_thinking: variable of chat templates; None omits it.
        think_end_token: end of a model's thinking, a text or a token id; answers begin after it.
        chat_template_args: other variables of chat templates.
        seed: seed of sampled texts, which depend on it and on their index in the run.
        max_concurrency: maximum number of calls to a server in flight.
        timeout_s: timeout of each call to a server; None for none.
        engine: all others, with `model`: options of `jpaged.LLM`.
    """

    model: str = ""
    target: str = ""
    tokenizer: str = ""
    adapter: str = ""
    max_length: int | None = None
    max_gen_toks: int = 256
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    enable_thinking: bool | None = None
    think_end_token: str | int | None = None
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    max_concurrency: int = 256
    timeout_s: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.target):
            raise InvalidArgument("model", "give either model=NAME_OR_FOLDER or target=HOST:PORT")
        if self.target and self.engine:
            name = min(self.engine)
            raise InvalidArgument(name, "is not a client option: the server at `target` has its own")
        for name in ("max_length", "max_gen_toks", "max_concurrency"):
            self._require_count(name, 1, is_left_out=name == "max_length" and self.max_length is None)
        self._require_count("seed", 0)
        self._require_count("prefix_token_id", 0, is_left_out=self.prefix_token_id is None)
        for name in ("add_bos_token", "enable_thinking"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidArgument(name, f"{getattr(self, name)!r} is neither true nor false")
        if not isinstance(self.chat_template_args, Mapping):
            raise InvalidArgument(
                "chat_template_args", f"{self.chat_template_args!r} is not a mapping of names to values"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidArgument("timeout_s", f"{self.timeout_s} is not above 0")
        if self.enable_thinking and self.think_end_token is None:
            raise InvalidArgument(
                "think_end_token", "is required with enable_thinking, because the answer starts after it"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> EvaluationOptions:
        """Parse the arguments that the harness passes to a model class.

        Raises:
            InvalidArgument: an option is given twice, or its value is out of range.
        """
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            known = _OPTION_ALIASES.get(name, name)
            if value is None or name in _WITHOUT_EFFECT:
                continue
            if known in given:
                raise InvalidArgument(name, f"is another name of {known}: give only one of them")
            given[known] = value
        own = {one.name for one in dataclasses.fields(cls)} - {"engine"}
        engine = {name: value for name, value in given.items() if name not in own}
        if "seed" in given and "target" not in given:
            engine["seed"] = given["seed"]
        fields = {name: value for name, value in given.items() if name in own}
        for name in ("model", "target", "tokenizer", "adapter"):
            if name in fields:
                fields[name] = str(fields[name])
        return cls(**fields, engine=engine)

    def _require_count(self, name: str, least: int, *, is_left_out: bool = False) -> None:
        value = getattr(self, name)
        if not is_left_out and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise InvalidArgument(name, f"{value!r} is not a whole number of at least {least}")


_NUM_KEPT = 64
"""Texts whose tokens are cached: the choices of a question arrive in sequence, with one context."""

_log = logging.getLogger(__name__)


class Texts:
    """Tokenizer of transformers, with rules for special tokens at the start of texts.

    Args:
        inner: transformers' tokenizer.
        add_bos_token: True if texts get special tokens; None leaves it to the tokenizer.
        prefix_token_id: token before texts without a context; None is the tokenizer's bos, or eos without one.
    """

    def __init__(self, inner: Any, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None) -> None:
        self.inner = inner
        self._add_bos_token = add_bos_token
        self._given_prefix_token_id = prefix_token_id
        self._encoded = functools.lru_cache(_NUM_KEPT)(self._encode)

    @classmethod
    def load(cls, folder: Path, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None) -> Texts:
        """Load the tokenizer of a folder in Hugging Face layout, without running code from there.

        Raises:
            InvalidArgument: there is none, or it is broken.
        """
        from transformers import AutoTokenizer  # takes a second to import

        if not folder.is_dir():
            raise InvalidArgument("tokenizer", f"{folder.name} is a file: give a folder or hub id as tokenizer=...")
        options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        try:
            inner = AutoTokenizer.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidArgument("tokenizer", f"{folder}: cannot be loaded: {lines[0]}") from error
        return cls(inner, add_bos_token=add_bos_token, prefix_token_id=prefix_token_id)

    @property
    def eos_token_id(self) -> int | None:
        """Return the token that ends a text; None if the tokenizer has none."""
        token_id: int | None = self.inner.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before texts without a context.

        Raises:
            InvalidArgument: the tokenizer has no such token.
        """
        for token_id in (self._given_prefix_token_id, self.inner.bos_token_id, self.inner.eos_token_id):
            if token_id is not None:
                return int(token_id)
        raise InvalidArgument("prefix_token_id", "is required: the tokenizer has no bos or eos token")

    @property
    def name(self) -> str:
        """Return the name under which the harness caches."""
        return str(self.inner.name_or_path).replace("/", "__")

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens of a text.

        Args:
            add_special_tokens: None applies the default, except to texts that already begin with the prefix token.
        """
        return list(self._encoded(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def get_id(self, token: str) -> int | None:
        """Return the id of a text that is one added token of the vocabulary, or None."""
        token_id: int | None = self.inner.get_added_vocab().get(token)
        return token_id

    def of_chat(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the chat template; if the template rejects a system message, drop it.

        Args:
            variables: variables of the template.
            add_generation_prompt: False leaves the last message open, to be continued.
        """
        render = functools.partial(
            self.inner.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **variables,
        )
        try:
            return str(render(list(messages)))
        except TemplateError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise InvalidArgument("messages", f"the chat template rejects them: {error}") from error
            _log.warning("the chat template rejects a conversation (%s): dropped its system message", error)
            return str(render(others))

    def _encode(self, text: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        flag = add_special_tokens
        if flag is None:
            flag = False if self._begins_with_prefix(text) else self._add_bos_token
        options = {} if flag is None else {"add_special_tokens": flag}
        return tuple(self.inner.encode(text, **options))

    def _begins_with_prefix(self, text: str) -> bool:
        prefix = str(self.inner.decode([self.prefix_token_id]))
        return bool(prefix) and text.startswith(prefix)


_UNREAD_TOKENS = 2
"""A score needs one slot after the text, for a token that is dropped, and the last token of the text is not read."""


class EvaluationRunner:
    """Runner of the harness's requests on a backend.

    Attributes:
        max_length: maximum number of tokens that the model reads for a score.

    Raises:
        InvalidArgument: the model has no room for the requested `max_length`.
    """

    def __init__(self, backend: EvaluationBackend, texts: Texts, options: EvaluationOptions) -> None:
        room = backend.max_model_len - _UNREAD_TOKENS
        if not 1 <= (options.max_length or room) <= room:
            raise InvalidArgument(
                "max_length", f"{options.max_length} is not from 1 to {room}: max_model_len is {backend.max_model_len}"
            )
        self.max_length = options.max_length or room
        self._max_total = options.max_length or backend.max_model_len
        self._backend, self._texts, self._options = backend, texts, options
        self._num_generated = 0
        end = options.think_end_token
        self._think_end = (
            self._texts.get_id(end) if isinstance(end, str) and self._texts.get_id(end) is not None else end
        )

    def loglikelihoods(self, pairs: Sequence[Pair], *, use_tqdm: bool | MakeBar = False) -> list[Likelihood]:
        """Return the likelihood of the second half of each pair after the first; an empty one is certain.

        Contexts that do not fit are cut at the beginning. Duplicates are computed once.

        Raises:
            InvalidArgument: a continuation alone is longer than `max_length`, or a context is empty.
        """
        fits = [fitted(pair, self.max_length) for pair in pairs]
        groups = grouped(fits)
        of_tokens = [group for group in groups if group.is_of_tokens]
        others = [group for group in groups if not group.is_of_tokens]
        found: dict[Pair, Likelihood] = {}
        if of_tokens:
            found |= by_pair(of_tokens, self._next_tokens(of_tokens, use_tqdm))
        if others:
            found |= by_pair(others, self._backend.score(others, use_tqdm))
        return [found[fit] if fit[1] else (0.0, True) for fit in fits]

    def generate(self, asks: Sequence[tuple[str, Mapping[str, Any]]], *, use_tqdm: bool | MakeBar = False) -> list[str]:
        """Generate a text after each context, by its generation_kwargs.

        Raises:
            InvalidArgument: a key is unknown, a value out of range, or the tokens to generate leave no room for the
            context.
        """
        generations = [self._generation(asked) for _, asked in asks]
        prompts = [self._prompt(context, one) for (context, _), one in zip(asks, generations, strict=True)]
        first = self._num_generated
        self._num_generated += len(asks)
        sampling = [seeded(one.sampling, self._options.seed, first + i) for i, one in enumerate(generations)]
        outputs = self._backend.complete(prompts, sampling, use_tqdm)
        return [self._answer(output, one.until) for output, one in zip(outputs, generations, strict=True)]

    def _next_tokens(self, groups: Sequence[ContinuationGroup], use_tqdm: bool | MakeBar) -> list[list[Likelihood]]:
        sampling = [
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                logprob_token_ids=[token_id for (token_id,) in group.continuations],
            )
            for group in groups
        ]
        outputs = self._backend.complete([group.context for group in groups], sampling, use_tqdm)
        return [_get_likelihoods(output) for output in outputs]

    def _generation(self, asked: Mapping[str, Any]) -> GenerationParams:
        return parse_generation_params(
            asked,
            max_tokens=self._options.max_gen_toks,
            eos_token_id=self._texts.eos_token_id,
            is_thinking=self._think_end is not None,
        )

    def _prompt(self, context: str, generation: GenerationParams) -> TokenIds:
        num_left = self._max_total - generation.sampling.max_num_tokens
        if num_left < 1:
            most = generation.sampling.max_num_tokens
            what = f"{most} tokens to generate leave none of {self._max_total} for the context"
            raise InvalidArgument("max_gen_toks", what)
        return tuple(self._texts.encode(context)[-num_left:]) or (self._texts.prefix_token_id,)

    def _answer(self, output: RequestOutput, until: Sequence[str]) -> str:
        """Return the generated text, from the end of the thinking to the first end text."""
        token_ids, end = list(output.outputs[0].token_ids), self._think_end
        if isinstance(end, int) and end in token_ids:
            token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        text = self._texts.decode(token_ids)
        if isinstance(end, str):
            text = text.rpartition(end)[2]
        return cut(text if end is None else text.lstrip(), until)


def _get_likelihoods(output: RequestOutput) -> list[Likelihood]:
    """Return the likelihoods of the requested tokens after a prompt."""
    (sequence,) = output.outputs
    if not sequence.logprobs:
        raise InternalError(f"request {output.request_id!r} has no log-probabilities of the tokens that it named")
    position = sequence.logprobs[0]
    return [(one.logprob, one.token_id == position.chosen.token_id) for one in position.asked]
