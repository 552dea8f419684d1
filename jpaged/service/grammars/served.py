"""The grammars of a served model: what they need is made when the first constraint comes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterable

from jpaged.engine.tokenizer import Tokenizer
from jpaged.service.grammars.compiler import CompiledGrammar, GrammarCompiler
from jpaged.service.grammars.limits import GrammarLimits
from jpaged.service.grammars.masks import LlguidanceMasks
from jpaged.service.grammars.vocabulary import Vocabulary
from jpaged.types import Request


class ServedGrammars:
    """Gives requests the grammars that they ask for. Safe to call from several threads.

    Args:
        vocab_size: V, the width of the model's logits.
        eos_token_ids: all tokens that end a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = limits
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    async def bind(self, request: Request) -> Request:
        """The request with its grammar, if it asks for one; the event loop is free meanwhile.

        Raises:
            InvalidArgument: the constraint is none, takes too much, or cannot be met in so many tokens.
            Unsupported: the model has no tokenizer of whose tokens the text is known, or none that ends a text.
            QueueFull, Unavailable: see `GrammarCompiler.compile`.
        """
        outputs = request.sampling.structured_outputs
        if outputs is None:
            return request
        compiler = self._compiler or await asyncio.to_thread(self._made)
        return _bound(request, await compiler.compile(outputs))

    def bind_now(self, request: Request) -> Request:
        """As `bind`, for callers that are on a thread of their own."""
        outputs = request.sampling.structured_outputs
        if outputs is None:
            return request
        return _bound(request, self._made().submit(outputs).result())

    def make_masks(self) -> LlguidanceMasks:
        """What fills masks, for one engine."""
        return LlguidanceMasks(self._made().vocabulary)

    def close(self) -> None:
        """End the processes that try grammars."""
        with self._lock:
            if self._compiler is not None:
                self._compiler.close()

    def _made(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_token_ids)
                self._compiler = GrammarCompiler(vocabulary, self._limits)
            return self._compiler


def _bound(request: Request, grammar: CompiledGrammar) -> Request:
    grammar.check_max_tokens(request.sampling.max_tokens)
    return dataclasses.replace(request, grammar=grammar)
