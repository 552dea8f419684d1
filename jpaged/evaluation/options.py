"""Options in --model_args: model or server, tokenization, and engine options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jpaged.errors import InvalidArgument

_OTHER_NAMES = {"pretrained": "model", "timeout": "timeout_s"}
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
            known = _OTHER_NAMES.get(name, name)
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
