"""A caller's input -> a `Request` that can run: tokenized, bounded, with a seed. Invalid input is rejected here.

Later stages do not validate a request again.

A request may resume after tokens generated on another server. The tokens are checked, and all state is rebuilt from
them, so that nothing else has to be sent:

    given tokens ──> text, stops ──> `ResumedSequence.text`    text held back at the seam
                └─> grammar     ──> `ResumedSequence.grammar`
                └─> ChatOutputParser     parses the emitted text without emitting it again

The cost grows with the number of tokens, so the work runs on a thread.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from jpaged.chat import ChatMessages, ChatOptions, GivenImage, images_in
from jpaged.engine.executor import BANNED_WIDTH, TOP_WIDTH, Geometry
from jpaged.engine.output.beam import num_candidates
from jpaged.engine.output.processor import OutputState, RememberedTexts
from jpaged.engine.scheduler.logits_processors import nothing_left
from jpaged.engine.tokenizer import NoTokenizer, PairTokenizer, Tokenizer, is_special_token
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.chat.output_config import ChatOutputConfig, naming_tools
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.service.chat.template import (
    CachingTokenizer,
    ToolAwareTokenizer,
    for_template,
    messages_bytes,
    read_messages,
)
from jpaged.structured import ThinkingBudget, ThinkingGrammar
from jpaged.types import (
    MAX_CHAT_MESSAGES,
    MAX_DETOKENIZE_IDS,
    MAX_STOP_TOKEN_IDS,
    MIN_MAX_CHAT_BYTES,
    MIN_MAX_TOKENIZE_BYTES,
    POOLINGS,
    EmbeddedSpan,
    GivenEmbeds,
    LoadedAdapter,
    PackedTokens,
    Pooling,
    PriorOutput,
    Prompt,
    PromptEmbeds,
    Request,
    ResumedSequence,
    SamplingParams,
    text_bytes,
)

if TYPE_CHECKING:
    from jpaged.service.image_inputs import ImageInputs

FIELD = "generated_token_ids"
_Tokens = TypeVar("_Tokens", bound=Sequence[int])


def check_generated(generated: Sequence[PriorOutput], sampling: SamplingParams) -> None:
    """Reject, before reading the tokens, generated sequences that a request of these parameters cannot resume from.

    Raises:
        InvalidArgument: names the field, and the limit.
    """
    if not generated:
        return
    if sampling.beam_width or sampling.num_samples > sampling.n:
        name = "beam_width" if sampling.beam_width else "best_of"
        raise InvalidArgument(FIELD, f"must be left out with sampling.{name}: such a request cannot be resumed")
    if sampling.seed is None and not sampling.is_greedy:
        raise InvalidArgument("sampling.seed", f"must be set with {FIELD}: the first response returned the seed")
    if len(generated) > sampling.n:
        raise InvalidArgument(FIELD, f"{len(generated)} sequences are over sampling.n ({sampling.n})")
    seen = set[int]()
    for place, one in enumerate(generated):
        _check_one(f"{FIELD}[{place}]", one, sampling)
        if one.index in seen:
            raise InvalidArgument(f"{FIELD}[{place}].index", f"{one.index} is given twice")
        seen.add(one.index)
    if sum(one.has_finished for one in generated) == sampling.n:
        raise InvalidArgument(FIELD, f"all {sampling.n} sequences have finished: nothing is left to generate")


def _check_one(field: str, one: PriorOutput, sampling: SamplingParams) -> None:
    if not 0 <= one.index < sampling.n:
        raise InvalidArgument(f"{field}.index", f"{one.index} is not from 0 to {sampling.n - 1}")
    if not math.isfinite(one.cumulative_logprob) or one.cumulative_logprob > 0:
        raise InvalidArgument(f"{field}.cumulative_logprob", f"{one.cumulative_logprob} is not a number up to 0")
    most = sampling.max_num_tokens - (not one.has_finished)
    if not 1 <= len(one.token_ids) <= most:
        what = "" if one.has_finished else ", at which it would have finished"
        raise InvalidArgument(
            f"{field}.ids",
            f"{len(one.token_ids)} tokens are not from 1 to {most}: max_tokens is {sampling.max_num_tokens}{what}",
        )


def continue_request(
    request: Request, generated: Sequence[PriorOutput], tokenizer: Tokenizer, eos_token_ids: frozenset[int]
) -> Request:
    """Return the request with its sequences resumed after their tokens; grammars are moved by `move_grammars`.

    Raises:
        InvalidArgument: one of the tokens would have ended its sequence.
    """
    texts = None if isinstance(tokenizer, NoTokenizer) else RememberedTexts(tokenizer)
    continued = []
    for place, one in enumerate(generated):
        if one.has_finished:
            continued.append(ResumedSequence(one))
            continue
        state, shown = OutputState(texts, request.prompt_token_ids, request.sampling, eos_token_ids), list[str]()
        for number, token_id in enumerate(one.token_ids, start=1):
            text, finish = state.push(token_id)
            if finish is not None:
                problem = f"token {number}, {token_id}, ends the sequence ({finish.reason.value}): set `finished`"
                raise InvalidArgument(f"{FIELD}[{place}].ids", problem)
            shown.append(text)
        continued.append(ResumedSequence(one, "".join(shown), state.text))
    return dataclasses.replace(request, continued=tuple(continued), prompt_logprobs_start=None)


def move_grammars(request: Request) -> Request:
    """Return the request with each sequence's grammar advanced over its tokens.

    Raises:
        InvalidArgument: a grammar does not allow them.
    """
    if request.grammar is None:
        return request
    moved, outputs = [], request.sampling.structured_outputs
    for place, one in enumerate(request.continued):
        if one.generated.has_finished:
            moved.append(one)
            continue
        state = request.grammar.start()
        if outputs is not None and outputs.always_complete:
            state.closing(request.sampling.max_num_tokens)
        for number, token_id in enumerate(one.generated.token_ids, start=1):
            if not state.accept(token_id):
                problem = f"token {number}, {token_id}, is not allowed there by the grammar of this request"
                raise InvalidArgument(f"{FIELD}[{place}].ids", problem)
        moved.append(dataclasses.replace(one, grammar=state))
    return dataclasses.replace(request, continued=tuple(moved))


OF_DECODERS: tuple[Pooling, ...] = ("last", "mean", "all")
"""Poolings of models that generate."""
POOLING_ONLY = "embeds or classifies texts and generates none: use /v1/embeddings, /classify, LLM.embed or LLM.classify"
_MAX_EOS_TOKEN_IDS = BANNED_WIDTH - MAX_STOP_TOKEN_IDS
_EXACT_BYTES = 4096
"""Texts up to this size are tokenized even if they cannot fit: it is cheap, and the error can state the token count."""


class InputProcessor:
    """Makes requests for one model. Thread-safe.

    Args:
        eos_token_ids: every token that ends a sequence of this model.
        max_logprobs: maximum top log-probabilities per position; -1 for the full vocabulary.
        answering: constraints and parsers of chats; None if answers are content only.
        generates: False for encoders and classifiers, whose requests must have a pooling.
        seed: base of the seeds of requests without one: the n-th request of a run always gets the same seed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        geometry: Geometry,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        max_logprobs: int = 20,
        answering: ChatOutputConfig | None = None,
        generates: bool = True,
    ) -> None:
        if len(eos_token_ids) > _MAX_EOS_TOKEN_IDS:
            raise InternalError(
                f"{len(eos_token_ids)} end-of-sequence tokens; at most {_MAX_EOS_TOKEN_IDS} are supported"
            )
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._geometry = geometry
        self._generates = generates
        self._images: ImageInputs | None = None
        self._seed = seed
        self._max_logprobs = max_logprobs
        self._answering = answering or ChatOutputConfig(tokenizer)
        self._counter = itertools.count()

    def set_images(self, images: ImageInputs) -> None:
        """Accept images; without this call they are refused."""
        self._images = images

    def make_request(
        self,
        *,
        request_id: str,
        sampling: SamplingParams,
        prompt: Prompt,
        deadline_s: float | None = None,
        tenant: str = "",
        cache_tenant: str = "",
        is_whole: bool = False,
        adapter: LoadedAdapter | None = None,
    ) -> Request:
        """Make a request from a prompt, of which exactly one form is set. Cheap checks run first.

        Raises:
            InvalidArgument: a field is invalid; names it.
            RequestTooLong: prompt and max_tokens exceed the limit.
            Unsupported: messages, but the model has no chat template; or tools that the template ignores or whose calls
                cannot be parsed.
        """
        prompt, sampling = _without_none(prompt, sampling)
        self._check_fields(prompt, sampling)
        token_ids, embeds = self._inputs(prompt, sampling, cache_tenant)
        if prompt.fills_length:
            most = self._max_tokens(len(token_ids), sampling)
            if prompt.max_filled is not None:
                most = max(sampling.max_num_tokens, min(most, prompt.max_filled))
            sampling = dataclasses.replace(sampling, max_tokens=most)
        sampling, thinking = self._constrained(prompt, sampling, token_ids)
        if sampling.routed_experts_prompt_start > len(token_ids):
            problem = f"{sampling.routed_experts_prompt_start} is over the {len(token_ids)} tokens of the prompt"
            raise InvalidArgument("sampling.routed_experts_prompt_start", problem)
        sampling = _without_empty_constraint(sampling)
        for place, one in enumerate(prompt.generated):
            self._checked_ids(f"generated_token_ids[{place}].ids", one.token_ids)
        bad_word_ids = self._bad_word_ids(sampling)
        number = next(self._counter)
        if sampling.seed is None and not sampling.beam_width:
            sampling = sampling.with_seed(_derived_seed(self._seed, number))
        request = Request(
            request_id=request_id or f"request-{number}",
            prompt_token_ids=token_ids if isinstance(token_ids, PackedTokens) else tuple(token_ids),
            sampling=sampling,
            prompt=prompt.text,
            deadline_s=deadline_s,
            tenant=tenant,
            cache_tenant=cache_tenant,
            is_non_streaming=is_whole,
            adapter=adapter,
            bad_word_ids=bad_word_ids,
            prompt_logprobs_start=_get_logprobs_start(prompt, sampling),
            pooling=prompt.pooling,
            is_encoded=self._geometry.is_encoder,
            pair_start=prompt.pair_start,
            grammar=None if thinking is None else ThinkingGrammar(thinking),
            thinking=thinking,
            embeds=embeds,
        )
        if prompt.generated:
            return continue_request(request, prompt.generated, self.tokenizer, self.eos_token_ids)
        if sampling.bans_tokens:
            forbidden = nothing_left(request, token_ids, self.eos_token_ids, self._geometry.vocab_size)
            if forbidden is not None:
                raise forbidden
        return request

    def _constrained(
        self, prompt: Prompt, sampling: SamplingParams, token_ids: Sequence[int]
    ) -> tuple[SamplingParams, ThinkingBudget | None]:
        """Return the parameters with what a chat's tools and format force, and the budget of thinking."""
        thinking: ThinkingBudget | None = None
        if prompt.messages is not None:
            sampling = self._answering.held(prompt.chat_options, sampling, token_ids)
            thinking = self._answering.thinking(prompt.chat_options, sampling, token_ids)
        elif sampling.thinking_token_budget is not None:
            thinking = self._answering.thinking(None, sampling, token_ids)
        if thinking is not None and sampling.sampling_logprobs:
            raise InvalidArgument("sampling.sampling_logprobs", "must be false with a thinking budget")
        return sampling, thinking

    def _check_fields(self, prompt: Prompt, sampling: SamplingParams) -> None:
        """Reject invalid fields with checks that need no tokenization."""
        poolings = POOLINGS if self._geometry.is_encoder else OF_DECODERS
        if prompt.pooling not in (None, *poolings):
            raise InvalidArgument("pooling", f"{prompt.pooling!r} is not one of {', '.join(map(repr, poolings))}")
        if prompt.pooling is None and not self._generates:
            raise Unsupported(f"this model {POOLING_ONLY}")
        forms = (prompt.text, prompt.token_ids, prompt.messages, prompt.embeds)
        if sum(form is not None for form in forms) != 1:
            raise InvalidArgument("prompt", "give exactly one of text, token ids, chat messages and prompt_embeds")
        self._check_beams(sampling)
        self._check_stops(sampling)
        self._check_logprobs(sampling)
        check_generated(prompt.generated, sampling)
        if prompt.messages is not None:
            self._answering.check(prompt.chat_options, sampling)
        elif sampling.thinking_token_budget is not None:
            self._answering.check_budget("thinking_token_budget", sampling)

    def answers(self, prompt: Prompt, sampling: SamplingParams, request: Request) -> ChatOutputParser | None:
        """Return the parser of the answers to a request made from these arguments; None if all text is content."""
        if prompt.messages is None:
            return None
        answers = self._answering.answers(prompt.chat_options, sampling, request.prompt_token_ids)
        if answers is not None:
            for continued in request.continued:
                answers.go_on(continued.generated.index, continued.shown)
        return answers

    def naming_errors(self, prompt: Prompt, sampling: SamplingParams, request: Request) -> AbstractContextManager[None]:
        """Return a context in which errors of the request's grammar name the caller's fields."""
        outputs, given = request.sampling.structured_outputs, sampling.structured_outputs
        if outputs is None or (given is not None and given.has_constraint):
            return nullcontext()
        return naming_tools(str(outputs.structural_tag), prompt.chat_options.shown_tools)

    def find_images(self, prompt: Prompt) -> Sequence[GivenImage]:
        """Return the images of a prompt, in order; messages must be `ChatMessages`."""
        if prompt.images:
            return prompt.images
        return images_in(prompt.messages) if isinstance(prompt.messages, ChatMessages) else ()

    def parse_images(self, prompt: Prompt) -> tuple[Prompt, Sequence[GivenImage]]:
        """Return a prompt with its messages parsed, and its images."""
        if prompt.messages is not None and not isinstance(prompt.messages, ChatMessages):
            prompt = dataclasses.replace(prompt, messages=ChatMessages(read_messages(prompt.messages)))
        return prompt, self.find_images(prompt)

    def _with_images(
        self, token_ids: Sequence[int], prompt: Prompt, sampling: SamplingParams
    ) -> tuple[Sequence[int], PromptEmbeds]:
        """Return the tokens of a prompt, images included, and the positions of the encoder's rows."""
        given = self.find_images(prompt)
        assert self._images is not None
        if prompt.pooling is not None or _get_logprobs_start(prompt, sampling) is not None:
            what = "a pooling" if prompt.pooling is not None else "prompt_logprobs"
            raise InvalidArgument(given[0].field, f"is not compatible with {what}: its positions have no tokens")
        kept, max_tokens = self._kept_part(prompt, sampling)
        if kept != slice(None):
            raise InvalidArgument("sampling.truncate_prompt_tokens", "is not supported with images")
        token_ids, embeds = self._images.place(token_ids, given, prompt.prepared)
        self._check_length(len(token_ids), sampling, max_tokens, fills_length=prompt.fills_length)
        return self._known("prompt", token_ids), embeds

    def _refuse_images(self, given: Sequence[GivenImage]) -> NoReturn:
        if self._images is None:
            raise InvalidArgument(given[0].field, "is an image, but the model reads only text: no vision encoder")
        raise InvalidArgument(given[0].field, "is an image: this method takes only text")

    def _inputs(
        self, prompt: Prompt, sampling: SamplingParams, cache_tenant: str
    ) -> tuple[Sequence[int], PromptEmbeds | None]:
        """Return the tokens of a prompt, and the embeddings in place of some of them, if any."""
        if prompt.embeds is not None:
            embeds = self._embeds(prompt.embeds, prompt, sampling)
            return [0] * embeds.spans[-1].stop, embeds
        if prompt.images and not prompt.prepared:
            self._refuse_images(prompt.images)
        token_ids = self._prompt_ids(prompt, sampling, cache_tenant)
        if not token_ids:
            raise InvalidArgument("prompt", "is empty: at least one token is needed")
        return self._with_images(token_ids, prompt, sampling) if prompt.prepared else (token_ids, None)

    def _embeds(self, given: GivenEmbeds, prompt: Prompt, sampling: SamplingParams) -> PromptEmbeds:
        """Return the embeddings of a prompt, truncated if requested, after checking that they fit into a sequence."""
        from jpaged.service import prompt_embeds  # only if a request has some

        if prompt.pooling is not None or _get_logprobs_start(prompt, sampling) is not None:
            what = "a pooling" if prompt.pooling is not None else "prompt_logprobs"
            raise InvalidArgument("prompt_embeds", f"is not compatible with {what}: its positions have no tokens")
        values_te = prompt_embeds.read_embeds(given, self._geometry)
        kept, max_tokens = self._kept_part(prompt, sampling)
        values_te = values_te[kept]
        fills, what = prompt.fills_length, prompt_embeds.FIELD
        self._check_length(len(values_te), sampling, max_tokens, fills_length=fills, what=what)
        prompt_embeds.check_finite(values_te, self._geometry)
        return prompt_embeds.with_digests((EmbeddedSpan(0, values_te),), len(values_te), self._geometry.block_size)

    def _kept_part(self, prompt: Prompt, sampling: SamplingParams) -> tuple[slice, int]:
        """Return the part of a prompt that truncation keeps, and the tokens for which it must leave room."""
        num_kept, max_tokens = sampling.truncate_prompt_tokens, sampling.max_num_tokens
        if prompt.is_only_told or prompt.pooling is not None:
            max_tokens = 0
        if num_kept == -1:
            num_kept = max(1, self._geometry.max_model_len - max_tokens)
        if num_kept is None:
            return slice(None), max_tokens
        return (slice(num_kept) if prompt.truncation_side == "right" else slice(-num_kept, None)), max_tokens

    def _prompt_ids(self, prompt: Prompt, sampling: SamplingParams, cache_tenant: str) -> Sequence[int]:
        """Return the tokens of a prompt, truncated if requested, after checking that they fit into a sequence."""
        kept, max_tokens = self._kept_part(prompt, sampling)
        if prompt.token_ids is not None:
            given = prompt.token_ids[kept]
            self._check_length(len(given), sampling, max_tokens, fills_length=prompt.fills_length)
            return self._checked_ids("prompt.token_ids", given)
        max_bytes = self._max_prompt_bytes(max_tokens)
        if kept != slice(None):
            max_bytes = max(max_bytes, MIN_MAX_TOKENIZE_BYTES)
        if prompt.messages is not None:
            owner = cache_tenant, sampling.cache_salt
            token_ids: Sequence[int] = self._chat_ids(
                prompt.messages, prompt.chat_options, max_bytes, owner, has_images=bool(prompt.prepared)
            )
        else:
            adds = prompt.add_special_tokens
            token_ids = self._text_ids("prompt", prompt.text or "", max_bytes, add_special_tokens=adds)
        token_ids = token_ids if kept == slice(None) else token_ids[kept]
        self._check_length(len(token_ids), sampling, max_tokens, fills_length=prompt.fills_length)
        return token_ids

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text or a conversation, which may be longer than a prompt.

        Raises:
            InvalidArgument, Unsupported: as in `make_request`.
            RequestTooLong: it exceeds the limit of this call.
        """
        max_bytes = max(self._max_prompt_bytes(1), MIN_MAX_TOKENIZE_BYTES)
        if prompt.messages is not None:
            has_images = bool(prompt.prepared)
            token_ids = list(self._chat_ids(prompt.messages, prompt.chat_options, max_bytes, has_images=has_images))
            if not has_images or self._images is None:
                return token_ids
            return self._images.place(token_ids, self.find_images(prompt), prompt.prepared)[0]
        return self._text_ids("text", prompt.text or "", max_bytes, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, which may be more than a sequence has.

        Raises:
            InvalidArgument: there are too many ids, or one is outside the vocabulary.
        """
        return self.tokenizer.decode(self._text_token_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[bytes]:
        """Return the bytes that each of several ids adds to a text; raise as `detokenize` does.

        Args:
            skip_special_tokens: special tokens have no bytes.
        """
        ids, tokenizer = self._text_token_ids(token_ids), self.tokenizer
        found = {token_id: tokenizer.token_bytes(token_id) for token_id in set(ids)}
        if skip_special_tokens:
            found |= {token_id: b"" for token_id in found if is_special_token(tokenizer, token_id)}
        return [found[token_id] for token_id in ids]

    def _text_token_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return ids of a text, which may be more than a sequence has."""
        limit = max(self._geometry.max_model_len, MAX_DETOKENIZE_IDS)
        if len(token_ids) > limit:
            raise InvalidArgument("token_ids", f"{len(token_ids)} ids; at most {limit}")
        return self._checked_ids("token_ids", token_ids)

    def prefix(self, prompt: Prompt, *, is_whole: bool = False) -> tuple[int, ...]:
        """Return the token ids of a prefix, which must be shorter than the model's length.

        Args:
            is_whole: no token follows, so the prefix may have the model's length.

        Raises:
            InvalidArgument: an id is outside the vocabulary.
            RequestTooLong: it is too long.
        """
        if prompt.token_ids is None:
            return tuple(self._text_ids("text", prompt.text or "", self._max_prompt_bytes(0 if is_whole else 1)))
        limit, num_tokens = self._geometry.max_model_len, len(prompt.token_ids)
        if is_whole and num_tokens > limit:
            raise RequestTooLong("token_ids", f"{num_tokens} tokens are over max_model_len ({limit})")
        if not is_whole and num_tokens >= limit:
            raise RequestTooLong("token_ids", f"{num_tokens} tokens are not below max_model_len ({limit})")
        return tuple(self._checked_ids("token_ids", prompt.token_ids))

    def pair(self, prompt: Prompt, limit: int | None = None) -> Prompt:
        """Return a pair of texts as token ids.

        Args:
            limit: tokens that are kept, as of `PairTokenizer`; -1 for the model's limit, None refuses longer pairs.

        Raises:
            InvalidArgument: a text cannot be encoded.
            RequestTooLong: it is too long.
            Unsupported: the tokenizer has no pairs.
        """
        first, second, most = prompt.text or "", prompt.text_pair or "", self._geometry.max_model_len
        if not isinstance(self.tokenizer, PairTokenizer):
            raise Unsupported("pairs of texts: this model is served without a tokenizer that joins them")
        num_bytes, max_bytes = text_bytes("prompt", first) + text_bytes("prompt", second), self._max_prompt_bytes(0)
        if limit is None and num_bytes > max_bytes:
            raise RequestTooLong("text", f"{num_bytes} bytes of text, over the limit of {max_bytes}: {self._limits()}")
        if num_bytes > max(max_bytes, MIN_MAX_TOKENIZE_BYTES):
            raise RequestTooLong("text", f"{num_bytes} bytes of text, over the limit of {MIN_MAX_TOKENIZE_BYTES}")
        token_ids, start = self.tokenizer.encode_pair(first, second, most if limit == -1 else limit)
        known = self.prefix(Prompt(token_ids=self._known("prompt", token_ids)), is_whole=True)
        return dataclasses.replace(prompt, text=None, text_pair=None, token_ids=known, pair_start=start)

    def _max_prompt_bytes(self, max_tokens: int) -> int:
        """Return the size above which a text has too many tokens for max_tokens, whatever the tokens."""
        return max((self._geometry.max_model_len - max_tokens) * self.tokenizer.max_token_bytes, _EXACT_BYTES)

    def _text_ids(self, field: str, text: str, max_bytes: int, *, add_special_tokens: bool = True) -> list[int]:
        num_bytes = text_bytes("prompt", text)
        if num_bytes > max_bytes:
            raise RequestTooLong(field, f"{num_bytes} bytes of text, over the limit of {max_bytes}: {self._limits()}")
        return self._known("prompt", self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        max_bytes: int,
        owner: tuple[str, str] | None = None,
        *,
        has_images: bool = False,
    ) -> Sequence[int]:
        """Return the ids of a conversation.

        Args:
            owner: tenant and salt of a request, which may use and extend the tokenizer's cache; None for other calls.
            has_images: the messages may have images, for which the template prints placeholders.
        """
        if not messages:
            raise InvalidArgument("chat.messages", "is empty: at least one message is needed")
        if len(messages) > MAX_CHAT_MESSAGES:
            raise InvalidArgument("chat.messages", f"{len(messages)} messages; at most {MAX_CHAT_MESSAGES}")
        messages = messages if isinstance(messages, ChatMessages) else read_messages(messages)
        if not has_images and (given := images_in(messages)):
            self._refuse_images(given)
        if options.continue_final_message and not messages[-1]["content"] and messages[-1].get("tool_calls"):
            raise InvalidArgument("continue_final_message", "needs a last message whose content can be continued")
        num_bytes = messages_bytes(messages) + (options.num_bytes if options.is_laid_out else 0)
        limit = max(max_bytes, MIN_MAX_CHAT_BYTES)
        if num_bytes > limit:
            raise RequestTooLong("chat.messages", f"{num_bytes} bytes, over the limit of {limit}: {self._limits()}")
        plain = for_template(messages, max_bytes=limit)
        has_layout = isinstance(self.tokenizer, ToolAwareTokenizer)
        if options.is_laid_out and self.tokenizer.has_chat_template and not has_layout:
            raise Unsupported("tools: this model's tokenizer formats only messages")
        if owner is not None and isinstance(self.tokenizer, CachingTokenizer):
            tenant, salt = owner
            token_ids = self.tokenizer.cached_chat_ids(plain, options, max_bytes=max_bytes, tenant=tenant, salt=salt)
            return self._known("chat.messages", token_ids)
        if options.is_laid_out and isinstance(self.tokenizer, ToolAwareTokenizer):
            return self._known("chat.messages", self.tokenizer.chat_ids(plain, options, max_bytes=max_bytes))
        return self._known("chat.messages", self.tokenizer.apply_chat_template(plain, max_bytes=max_bytes))

    def _known(self, field: str, token_ids: _Tokens) -> _Tokens:
        """Reject ids outside the model's vocabulary, which may be smaller than the tokenizer's."""
        vocab_size, largest = self._geometry.vocab_size, _largest(token_ids)
        if largest >= vocab_size:
            text = f"the tokenizer returned token {largest}; the model has tokens from 0 to {vocab_size - 1}"
            raise InvalidArgument(field, text)
        return token_ids

    def _limits(self) -> str:
        length, num_bytes = self._geometry.max_model_len, self.tokenizer.max_token_bytes
        return f"max_model_len is {length}, and a token has at most {num_bytes} bytes"

    def _checked_ids(self, field: str, token_ids: Sequence[int]) -> list[int]:
        ids, vocab_size = list(token_ids), self._geometry.vocab_size
        if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
            return ids
        wrong = next(one for one in ids if type(one) is not int or not 0 <= one < vocab_size)
        raise InvalidArgument(field, f"{wrong!r} is not a token id from 0 to {vocab_size - 1}")

    def _check_length(
        self,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        max_tokens: int,
        *,
        fills_length: bool,
        what: str = "prompt",
    ) -> None:
        """Reject a request that can never fit; the error names the prompt only if one more token does not fit.

        Args:
            fills_length: `max_tokens` is the minimum, which the caller gives as `min_tokens`.
            what: field of the prompt.
        """
        geometry = self._geometry
        total, num_rows = num_prompt_tokens + max_tokens, sampling.beam_width or sampling.num_samples
        if num_rows > (limit := geometry.max_num_seqs_of_rank):
            name = "beam_width" if sampling.beam_width else "best_of" if sampling.best_of else "n"
            of_rank = f" over {geometry.dp_size} devices" if geometry.dp_size > 1 else ""
            raise InvalidArgument(f"sampling.{name}", f"{num_rows} is over max_num_seqs{of_rank} ({limit})")
        text = f"{num_prompt_tokens} prompt tokens"
        text += f" and {max_tokens} to generate make {total}" if max_tokens else ""
        shortest, name = min(max_tokens, 1), "sampling.min_tokens" if fills_length else "sampling.max_tokens"
        if total > geometry.max_model_len:
            field = what if num_prompt_tokens + shortest > geometry.max_model_len else name
            raise RequestTooLong(field, f"{text}, over max_model_len ({geometry.max_model_len})")
        needed = geometry.num_blocks_alone(num_prompt_tokens, max_tokens, num_rows)
        if needed > (limit := geometry.num_blocks_of_rank):
            pool_tokens = limit * geometry.block_size
            blocks = f"{limit} blocks of {geometry.block_size}"
            each = f" for each of {num_rows} sequences" if num_rows > 1 else ""
            times = f"{each}, {needed} blocks" if num_rows > 1 or len(geometry.windows) > 1 else ""
            field = what if geometry.num_blocks_alone(num_prompt_tokens, shortest, num_rows) > limit else name
            raise RequestTooLong(field, f"{text}{times}, over the whole pool ({pool_tokens}: {blocks})")

    def _max_tokens(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        """Return the largest max_tokens that fits after a prompt, given that `sampling.max_tokens` fits."""
        geometry, num_rows = self._geometry, sampling.beam_width or sampling.num_samples
        lengths = range(sampling.max_num_tokens, geometry.max_model_len - num_prompt_tokens + 1)
        num_fitting = bisect.bisect_right(
            lengths,
            geometry.num_blocks_of_rank,
            key=lambda most: geometry.num_blocks_alone(num_prompt_tokens, most, num_rows),
        )
        return lengths[num_fitting - 1]

    def _bad_word_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word, both at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            for text in (word.strip(), f" {word.strip()}"):
                ids = self._known("sampling.bad_words", self.tokenizer.encode(text, add_special_tokens=False))
                found[tuple(ids)] = None
        return tuple(ids for ids in found if ids)

    def _check_beams(self, sampling: SamplingParams) -> None:
        if not sampling.beam_width:
            return
        num_ending = len(sampling.ending_ids(self.eos_token_ids))
        needed = num_candidates(sampling.beam_width, num_ending)
        if needed > TOP_WIDTH:
            raise InvalidArgument(
                "sampling.beam_width",
                f"{sampling.beam_width} with {num_ending} ending tokens ranks {needed} candidates per beam; "
                f"the device returns at most {TOP_WIDTH}",
            )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        limit, all_of_them = self._max_logprobs, self._geometry.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, name)
            if asked is not None and 0 <= limit < (all_of_them if asked < 0 else asked):
                raise InvalidArgument(f"sampling.{name}", f"{asked} is over max_logprobs ({limit})")

    def _check_stops(self, sampling: SamplingParams) -> None:
        vocab_size = self._geometry.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            for token_id in getattr(sampling, name) or ():
                if token_id >= vocab_size:
                    raise InvalidArgument(f"sampling.{name}", f"{token_id} is not below {vocab_size}")
        if sampling.bad_words and isinstance(self.tokenizer, NoTokenizer):
            raise InvalidArgument("sampling.bad_words", "this model has no tokenizer: use logit_bias")
        if sampling.stop and isinstance(self.tokenizer, NoTokenizer):
            raise InvalidArgument("sampling.stop", "this model has no tokenizer, so no text: use stop_token_ids")


def _without_none(prompt: Prompt, sampling: SamplingParams) -> tuple[Prompt, SamplingParams]:
    """Return a prompt and its parameters, with `fills_length` if `max_tokens` is None."""
    if sampling.max_tokens is not None:
        return prompt, sampling
    prompt = dataclasses.replace(prompt, fills_length=True, max_filled=None)
    return prompt, dataclasses.replace(sampling, max_tokens=max(1, sampling.min_tokens))


def _without_empty_constraint(sampling: SamplingParams) -> SamplingParams:
    """Return parameters without structured outputs that only have options of a constraint, without a constraint."""
    outputs = sampling.structured_outputs
    is_empty = outputs is not None and not outputs.has_constraint
    return dataclasses.replace(sampling, structured_outputs=None) if is_empty else sampling


def _largest(token_ids: Sequence[int]) -> int:
    """Return the largest of several token ids; -1 for none."""
    if isinstance(token_ids, PackedTokens) and token_ids:
        return int(np.frombuffer(token_ids.packed, np.int32).max())
    return max(token_ids, default=-1)


def _get_logprobs_start(prompt: Prompt, sampling: SamplingParams) -> int | None:
    is_own = prompt.prompt_logprobs_start is not None or sampling.prompt_logprobs is None
    return prompt.prompt_logprobs_start if is_own else 1


def _derived_seed(engine_seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{engine_seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
