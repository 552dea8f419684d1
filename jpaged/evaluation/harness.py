"""The class that the harness knows: `lm_eval --model jpaged --model_args target=localhost:50051 --tasks ...`.

The harness encodes contexts and continuations, makes the windows of long texts and keeps its cache of answers; this
hands tokens on. It finds the class by this package's entry point in the group `lm_eval.models`, which is read by what
has https://github.com/EleutherAI/lm-evaluation-harness/pull/4013, or when this module is imported.
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
from jpaged.evaluation.backends import OfflineBackend, RemoteBackend
from jpaged.evaluation.options import EvaluationOptions
from jpaged.evaluation.pairs import Likelihood, Pair
from jpaged.evaluation.runner import Runner
from jpaged.evaluation.texts import Texts
from jpaged.llm import LLM
from jpaged.version import __version__

NAME = "jpaged"
_NUM_KEPT_AT_ONCE = 1024
"""Requests whose answers the harness keeps together, with --use_cache: what an interrupted run does not lose."""

_T = TypeVar("_T")


@register_model(NAME)
class JpagedLM(TemplateLM):
    """A model of the harness.

    Args:
        arguments: of --model_args, see `EvaluationOptions`, and what the harness adds: `batch_size` and
            `max_batch_size` have no effect, as the engine batches by itself.

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
        self._runner = Runner(self._backend, self._texts, options)
        self.tokenizer = self._texts.inner

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token_id = self._texts.eos_token_id
        return self._texts.prefix_token_id if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        """What texts without a context are behind."""
        return self._texts.prefix_token_id

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self._runner.max_length

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say."""
        return self._options.max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness keeps the requests that it has made."""
        return self._texts.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: object) -> list[int]:
        return self._texts.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        variables = dict(self._options.chat_template_args)
        if self._options.enable_thinking is not None:
            variables["enable_thinking"] = self._options.enable_thinking
        return self._texts.of_chat(chat_history, variables, add_generation_prompt=add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness keeps with its results."""
        where = {"target": self._options.target} if self._options.target else {}
        return {"jpaged_version": __version__, "model_name": self._model_name, "max_length": self.max_length, **where}

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        if self._options.enable_thinking:
            raise InvalidArgument("enable_thinking", "tasks that score texts have no answer to think about")
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
        """Gives the device's memory back; the model is spent."""
        self._backend.close()

    def _windows(self, text: str) -> list[Pair]:
        """The windows of a text: each token is predicted once, behind as many before it as fit."""
        windows: Iterable[Pair] = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _at_once(self, requests: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """All of them, or so many as are kept together where the harness keeps answers."""
        width = len(requests) if self.cache_hook.dbdict is None else _NUM_KEPT_AT_ONCE
        return (requests[first : first + width] for first in range(0, len(requests), max(width, 1)))


def _open(options: EvaluationOptions) -> tuple[OfflineBackend | RemoteBackend, str]:
    """The engine or the server, and the name of its model."""
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
        raise InvalidArgument("tokenizer", f"is needed: {error}") from error
    return Texts.load(folder, add_bos_token=options.add_bos_token, prefix_token_id=options.prefix_token_id)
