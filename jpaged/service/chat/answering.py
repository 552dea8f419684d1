"""Constraints and parsers of one model's chat answers, chosen by the model's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from jpaged.chat import ChatOptions, ToolChoiceMode
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.service.chat.answers import ChatAnswers
from jpaged.service.chat.parsers.formats import AnswerFormat
from jpaged.service.chat.structural_tag import SpecialTokens, structural_tag_for
from jpaged.structured import StructuredOutputs, TagTexts, ThinkingBudget
from jpaged.types import SamplingParams

_NUM_TAIL_TOKENS = 16
"""Tokens at a prompt's end that are decoded to see if it opens or closes reasoning; a tag may take several tokens."""


@runtime_checkable
class KnowsSpecialTokens(Protocol):
    """Tokenizer that exposes the special tokens that `decode` leaves out."""

    @property
    def special_tokens(self) -> frozenset[str]: ...

    def tag_ids(self, tag: str) -> list[int]: ...


class ChatAnswering:
    """Constraints and parsers of a model's chat answers. Thread-safe.

    Args:
        answer_format: how the model writes reasoning and calls; None if unknown.
        eos_token_ids: every token that ends an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._format = answer_format or AnswerFormat()
        self._special_tokens: frozenset[str] = frozenset()
        self._tag_tokens = SpecialTokens()
        if isinstance(tokenizer, KnowsSpecialTokens):
            self._special_tokens = frozenset(token for token in tokenizer.special_tokens if token)
            ids = {token: tokenizer.tag_ids(token) for token in self._special_tokens if self._format.has_tag(token)}
            of_one = {token: found[0] for token, found in ids.items() if len(found) == 1}
            self._tag_tokens = SpecialTokens(of_one, eos_token_ids)

    def check(self, options: ChatOptions, sampling: SamplingParams) -> None:
        """Reject options that no answer of this model can satisfy. Cheap.

        Raises:
            InvalidArgument: a field of `sampling` conflicts with the options.
            Unsupported: the server does not know this model's format, or cannot enforce the options.
        """
        if options.reasoning.thinking_token_budget is not None:
            self._check_budget(sampling)
        if not options.reasoning.include and self._format.reasoning is None:
            raise Unsupported(
                "reasoning.include: the reasoning format of this model is unknown, so it cannot be left out; set "
                "--reasoning-parser"
            )
        if not options.shown_tools:
            return
        if self._format.tools is None:
            raise Unsupported(
                "tools: the tool call format of this model is unknown; set --tool-call-parser, or use "
                "tool_choice 'none'"
            )
        if not sampling.detokenize:
            raise InvalidArgument("sampling.detokenize", "must be true with tools: calls are read from the text")

    def held(self, options: ChatOptions, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Return sampling parameters that keep the answer parseable and constrain its calls to the tools.

        Raises:
            InvalidArgument: the text has another constraint already, or the tools exceed the limits of a grammar.
        """
        has_tools = bool(options.shown_tools)
        if self._format.needs_special_tokens(self._special_tokens, has_tools=has_tools):
            sampling = replace(sampling, skip_special_tokens=False)
        if not has_tools or self._format.tools is None:
            return sampling
        tag = structural_tag_for(
            options.shown_tools,
            options.choice,
            self._format,
            is_parallel=options.parallel_tool_calls,
            is_open=self._is_open(prompt_token_ids),
            tokens=self._tag_tokens,
        )
        if tag is None:
            return sampling
        given = sampling.structured_outputs
        if given is not None and given.has_constraint:
            what = _why_held(options)
            raise InvalidArgument(
                "sampling.structured_outputs", f"conflicts with {what}, which also requires a grammar"
            )
        try:
            held = StructuredOutputs(structural_tag=tag).with_options(given)
            return replace(sampling, structured_outputs=held)
        except InvalidArgument as error:
            raise InvalidArgument("tools", f"their grammar is invalid: {error.problem}") from error

    def thinking(self, options: ChatOptions, prompt_token_ids: Sequence[int]) -> ThinkingBudget | None:
        """Return the thinking budget of an answer with the model's tags; None if unlimited."""
        budget, reasoning = options.reasoning.thinking_token_budget, self._format.reasoning
        if budget is None or reasoning is None:
            return None
        opens, closes = (self._tag_ids(tag) for tag in (reasoning.open_tag, reasoning.close_tag))
        texts = TagTexts(
            reasoning.open_tag,
            reasoning.close_tag,
            lambda token_id: self._tokenizer.decode([token_id], skip_special_tokens=False),
        )
        is_open = self._is_open(prompt_token_ids)
        return ThinkingBudget(opens, closes, budget, is_open_at_start=is_open, texts=texts)

    def answers(
        self, options: ChatOptions, sampling: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> ChatAnswers | None:
        """Return the parser of the answers to a chat; None if all text is content.

        Args:
            sampling: the parameters as the caller sent them.
        """
        has_tools = bool(options.shown_tools)
        parts = (self._format.tools if has_tools else None, self._format.reasoning)
        if not sampling.detokenize or parts == (None, None):
            return None
        is_open = self._is_open(prompt_token_ids)
        is_kept = self._format.needs_special_tokens(self._special_tokens, has_tools=has_tools)
        names = [tool.name for tool in options.shown_tools]
        return ChatAnswers(
            lambda: self._format.parser(is_open=is_open, has_tools=has_tools, tool_names=names),
            has_reasoning=options.reasoning.include,
            hidden_tokens=self._special_tokens if is_kept and sampling.skip_special_tokens else (),
            has_content=not (has_tools and options.choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)),
        )

    def _check_budget(self, sampling: SamplingParams) -> None:
        if self._format.reasoning is None:
            raise Unsupported(
                "reasoning.thinking_token_budget: the reasoning format of this model is unknown; set --reasoning-parser"
            )
        if sampling.beam_width:
            raise InvalidArgument("reasoning.thinking_token_budget", "must be left out with sampling.beam_width")

    def _tag_ids(self, tag: str) -> list[int]:
        if isinstance(self._tokenizer, KnowsSpecialTokens):
            return self._tokenizer.tag_ids(tag)
        return self._tokenizer.encode(tag, add_special_tokens=False)

    def _is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        tail = list(prompt_token_ids[-_NUM_TAIL_TOKENS:])
        return self._format.is_open(self._tokenizer.decode(tail, skip_special_tokens=False))


def _why_held(options: ChatOptions) -> str:
    mode = options.choice.mode
    if mode is not ToolChoiceMode.AUTO:
        return f"tool_choice {mode.value!r}"
    return "parallel_tool_calls of false" if not options.parallel_tool_calls else "a strict tool"
