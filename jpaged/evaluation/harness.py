"""Model class of the harness: `lm_eval --model jpaged --model_args target=localhost:50051 --tasks ...`.

The harness encodes contexts and continuations, splits long texts into windows and caches answers; this class passes
tokens to the runner. The harness finds it by the entry point of this package in the group `lm_eval.models` (releases
with https://github.com/EleutherAI/lm-evaluation-harness/pull/4013), or when this module is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jpaged.checkpoints.hub import find_folder
from jpaged.errors import InvalidArgument, NotFound
from jpaged.evaluation.backends import Likelihood, OfflineBackend, Pair, RemoteBackend
from jpaged.evaluation.runner import EvaluationOptions, EvaluationRunner, Texts
from jpaged.llm import LLM
from jpaged.version import __version__

NAME = "jpaged"
_NUM_KEPT_AT_ONCE = 1024
"""Number of requests per call with --use_cache: an interrupted run loses at most these answers."""

_T = TypeVar("_T")


@register_model(NAME)
class JpagedLM(TemplateLM):
    """Model of the harness.

    Args:
        arguments: --model_args, see `EvaluationOptions`, and the harness's arguments: `batch_size` and `max_batch_size`
            have no effect, because the engine does continuous batching.

    Raises:
        InvalidArgument: an option is unknown or out of range, or the tokenizer is not the server's.
        NotFound: there is no such model or tokenizer.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        options = EvaluationOptions.of(arguments)
        self._options = options
        self._backend, self._model_name = _open(options)
        self._texts = _texts(options, self._model_name)
        if isinstance(self._backend, RemoteBackend):
            self._backend.require_tokenizer(lambda text: self._texts.encode(text, add_special_tokens=False))
        self._runner = EvaluationRunner(self._backend, self._texts, options)
        self.tokenizer = self._texts.inner

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text."""
        token_id = self._texts.eos_token_id
        return self._texts.prefix_token_id if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before texts without a context."""
        return self._texts.prefix_token_id

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens that the model reads."""
        return self._runner.max_length

    @property
    def max_gen_toks(self) -> int:
        """Return the default number of tokens to generate."""
        return self._options.max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which the harness caches its requests."""
        return self._texts.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: object) -> list[int]:
        return self._texts.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        variables = dict(self._options.chat_template_args)
        if self._options.enable_thinking is not None:
            variables["enable_thinking"] = self._options.enable_thinking
        return self._texts.of_chat(chat_history, variables, add_generation_prompt=add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Return the fields that the harness stores with its results."""
        where = {"target": self._options.target} if self._options.target else {}
        return {"jpaged_version": __version__, "model_name": self._model_name, "max_length": self.max_length, **where}

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        if self._options.enable_thinking:
            raise InvalidArgument("enable_thinking", "does not work with tasks that only score texts")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: object
    ) -> list[Likelihood]:
        found: list[Likelihood] = []
        for some in self._at_once(requests):
            pairs: list[Pair] = [(context, continuation) for _, context, continuation in some]
            likelihoods = self._runner.loglikelihoods(pairs, use_tqdm=not disable_tqdm)
            for (key, _, _), likelihood in zip(some, likelihoods, strict=True):
                self.cache_hook.add_partial("loglikelihood", key, likelihood)
            found += likelihoods
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found: list[float] = []
        for some in self._at_once(requests):
            windows = [self._windows(request.args[0]) for request in some]
            pairs = list(itertools.chain.from_iterable(windows))
            likelihoods = iter(self._runner.loglikelihoods(pairs, use_tqdm=not disable_tqdm))
            for request, each in zip(some, windows, strict=True):
                total = sum(logprob for logprob, _ in itertools.islice(likelihoods, len(each)))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
                found.append(total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: list[str] = []
        for some in self._at_once(requests):
            texts = self._runner.generate([request.args for request in some], use_tqdm=not disable_tqdm)
            for request, text in zip(some, texts, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            found += texts
        return found

    def close(self) -> None:
        """Close the engine; the model cannot be used any more."""
        self._backend.close()

    def _windows(self, text: str) -> list[Pair]:
        """Return the windows of a text: each token is predicted once, after the longest context that fits."""
        windows: Iterable[Pair] = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _at_once(self, requests: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Return the requests in one part, or in parts of limited size if the harness caches answers."""
        width = len(requests) if self.cache_hook.dbdict is None else _NUM_KEPT_AT_ONCE
        return (requests[first : first + width] for first in range(0, len(requests), max(width, 1)))


def _open(options: EvaluationOptions) -> tuple[OfflineBackend | RemoteBackend, str]:
    """Open the engine or the server; return it and the name of the model."""
    if options.target:
        remote = RemoteBackend(
            options.target,
            adapter=options.adapter,
            max_concurrency=options.max_concurrency,
            timeout_s=options.timeout_s,
        )
        return remote, remote.model.name
    return OfflineBackend(LLM(options.model, **options.engine), options.adapter), options.model


def _texts(options: EvaluationOptions, model_name: str) -> Texts:
    try:
        folder = find_folder(options.tokenizer or model_name)
    except NotFound as error:
        if options.tokenizer:
            raise
        raise InvalidArgument("tokenizer", f"is required: {error}") from error
    return Texts.load(folder, add_bos_token=options.add_bos_token, prefix_token_id=options.prefix_token_id)
