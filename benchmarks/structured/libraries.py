"""llguidance and xgrammar behind the same few verbs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from benchmarks.structured.vocabularies import Tokens


class Matcher(Protocol):
    """Where one text is in its grammar."""

    def fill(self) -> None:
        """Write the mask of the next token into this matcher's own array."""
        ...

    def accept(self, token_id: int) -> bool: ...


class Library(Protocol):
    """A grammar library with one vocabulary."""

    name: str

    def compile(self, kind: str, text: str) -> Any:
        """Compile, with nothing kept from before.

        Raises:
            ValueError: the library refuses it.
        """
        ...

    def start(self, compiled: Any) -> Matcher: ...


@dataclass
class _LlguidanceMatcher:
    inner: Any
    mask_w: np.ndarray
    eos_token_id: int

    def fill(self) -> None:
        self.inner.unsafe_compute_mask_ptr(self.mask_w.ctypes.data, self.mask_w.nbytes)

    def accept(self, token_id: int) -> bool:
        if token_id == self.eos_token_id:
            return bool(self.inner.is_accepting())
        return bool(self.inner.try_consume_tokens([token_id]))


class Llguidance:
    name = "llguidance"

    def __init__(self, tokens: Tokens) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(tokens.tokenizer_json, n_vocab=tokens.vocab_size, eos_token=tokens.eos_token_id)
        self._eos_token_id = tokens.eos_token_id
        self._num_words = (tokens.vocab_size + 31) // 32

    def compile(self, kind: str, text: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar_from(kind, text), log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> Matcher:
        return _LlguidanceMatcher(compiled.deep_copy(), np.zeros(self._num_words, np.int32), self._eos_token_id)


@dataclass
class _XgrammarMatcher:
    inner: Any
    mask: Any

    def fill(self) -> None:
        self.inner.fill_next_token_bitmask(self.mask)

    def accept(self, token_id: int) -> bool:
        return bool(self.inner.accept_token(token_id))


class Xgrammar:
    name = "xgrammar"

    def __init__(self, tokens: Tokens) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo(
            tokens.texts,
            vocab_type=xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=tokens.vocab_size,
            stop_token_ids=[tokens.eos_token_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = tokens.vocab_size

    def compile(self, kind: str, text: str) -> Any:
        compiler = self._compiler
        try:
            if kind == "json":
                return compiler.compile_json_schema(text, any_whitespace=True, strict_mode=False)
            if kind == "regex":
                return compiler.compile_regex(text)
            if kind == "choice":
                choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
                return compiler.compile_grammar(f"root ::= {choices}")
            return compiler.compile_grammar(text)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def start(self, compiled: Any) -> Matcher:
        mask = self._library.allocate_token_bitmask(1, self._vocab_size)
        return _XgrammarMatcher(self._library.GrammarMatcher(compiled), mask)


def available() -> Sequence[type[Llguidance] | type[Xgrammar]]:
    """The libraries that are installed; xgrammar needs torch beside it."""
    has_other = all(importlib.util.find_spec(name) is not None for name in ("xgrammar", "torch"))
    return (Llguidance, Xgrammar) if has_other else (Llguidance,)


def versions() -> dict[str, str]:
    """What was measured."""
    return {library.name: version(library.name) for library in available()}
