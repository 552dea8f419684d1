"""State that a prefill server hands to a decode server: the first token of each sequence, and the blocks.

`begun` resumes a request after the first tokens. `PrefillServers` is the interface of prefill servers as a decode
server sees them, independent of the protocol.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jpaged.engine.executor import ArrayPart, BlockOffer
from jpaged.engine.output.processor import OutputState, RememberedTexts
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import InternalError, InvalidArgument
from jpaged.service.input_processor import move_grammars
from jpaged.service.kv_protocol import BlockPiece
from jpaged.types import OutputEvent, PositionLogprobs, PriorOutput, Request, ResumedSequence, SamplingParams, Usage

_MAX_LOGPROB = 1e-3
"""Tolerance: sums of rounded log-probabilities may slightly exceed 0."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a sequence. `logprobs` is None if the request has none."""

    index: int
    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose first tokens another server has sampled.

    Attributes:
        events: the events of the first tokens for its caller.
        request: the rest of the request; None if it is complete.
    """

    events: tuple[OutputEvent, ...]
    request: Request | None


def prompt_alone(sampling: SamplingParams) -> SamplingParams:
    """Return parameters that sample only the first token, exactly as `sampling` would."""
    return dataclasses.replace(
        sampling, max_tokens=1, min_tokens=min(1, sampling.min_tokens), truncate_prompt_tokens=None
    )


def begun(
    request: Request,
    tokens: Sequence[FirstToken],
    num_cached_tokens: int,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    vocab_size: int,
) -> Begun:
    """Return the events of the first tokens and the rest of the request. The cost grows only with the prompt's tail.

    Raises:
        InternalError: the tokens cannot be first tokens of this request.
    """
    _check(request, tokens, vocab_size)
    if not 0 <= num_cached_tokens <= len(request.prompt_token_ids):
        size = len(request.prompt_token_ids)
        raise InternalError(f"the prefill server returned {num_cached_tokens} cached tokens for a prompt of {size}")
    texts = None if isinstance(tokenizer, NoTokenizer) else RememberedTexts(tokenizer)
    events, continued = list[OutputEvent](), list[ResumedSequence]()
    for number, one in enumerate(tokens, start=1):
        state = OutputState(texts, request.prompt_token_ids, request.sampling, eos_token_ids)
        text, finish = state.push(one.token_id)
        told_sum = min(0.0, one.logprobs.chosen.logprob) if one.logprobs is not None else 0.0
        events.append(
            OutputEvent(
                request.request_id,
                one.index,
                text,
                (one.token_id,),
                () if one.logprobs is None else (one.logprobs,),
                finish,
                told_sum if request.sampling.needs_logprobs else None,
                Usage(len(request.prompt_token_ids), number, num_cached_tokens),
            )
        )
        generated = PriorOutput(one.index, (one.token_id,), told_sum, finish is not None)
        continued.append(ResumedSequence(generated) if finish else ResumedSequence(generated, text, state.text))
    if all(one.generated.has_finished for one in continued):
        return Begun((*events[:-1], dataclasses.replace(events[-1], is_last=True)), None)
    try:
        left = move_grammars(dataclasses.replace(request, continued=tuple(continued)))
    except InvalidArgument as error:
        raise InternalError(f"the prefill server sampled a token that the request does not allow: {error}") from error
    return Begun(tuple(events), left)


def _check(request: Request, tokens: Sequence[FirstToken], vocab_size: int) -> None:
    found, wanted = sorted(one.index for one in tokens), list(range(request.sampling.n))
    if found != wanted:
        raise InternalError(f"the prefill server returned sequences {found} instead of {wanted}")
    for one in tokens:
        if not 0 <= one.token_id < vocab_size:
            raise InternalError(f"the prefill server sampled token {one.token_id}, which is not below {vocab_size}")
        if (one.logprobs is None) != (not request.sampling.needs_logprobs):
            raise InternalError("the prefill server returned other log-probabilities than requested")
        if one.logprobs is not None:
            _check_logprobs(request.sampling, one.token_id, one.logprobs, vocab_size)


def _check_logprobs(sampling: SamplingParams, token_id: int, told: PositionLogprobs, vocab_size: int) -> None:
    most, top_ids = sampling.logprobs or 0, [one.token_id for one in told.top]
    most = vocab_size if most < 0 else most
    if told.chosen.token_id != token_id:
        raise InternalError(
            f"the prefill server returned a log-probability of token {told.chosen.token_id} instead of {token_id}"
        )
    if len(top_ids) > min(most, vocab_size) or len(set(top_ids)) < len(top_ids):
        raise InternalError(
            f"the prefill server returned {len(top_ids)} top tokens; expected up to {most} different ones"
        )
    if {one.token_id for one in told.asked} != set(sampling.logprob_token_ids):
        raise InternalError("the prefill server returned log-probabilities of other tokens than requested")
    for one in (told.chosen, *told.top, *told.asked):
        is_sound = one.logprob <= _MAX_LOGPROB and (one.rank is None or 1 <= one.rank <= vocab_size)  # False for NaN
        if not is_sound or not 0 <= one.token_id < vocab_size:
            raise InternalError(f"the prefill server returned an invalid log-probability: {one}")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The blocks that a decode server can use.

    Attributes:
        kv_identity: see `HostBlocks.kv_identity`.
        block_size: tokens of a block.
        data_protocol: of the data port; "" for none.
        model_identity: digest of what blocks depend on, except their layout; empty without a data port.
    """

    kv_identity: bytes
    block_size: int
    data_protocol: str = ""
    model_identity: bytes = b""


KVPart = Sequence[BlockPiece] | BlockOffer
"""Blocks of a prompt: pieces of them, or an offer of a data port."""
_Numbers = Iterable[int]


def build_offer(
    source: tuple[int, str],
    kind: tuple[str, _Numbers],
    parts: Iterable[tuple[_Numbers, _Numbers]],
    rows: tuple[_Numbers, _Numbers],
    positions: Iterable[tuple[int, int]],
    last_key: bytes,
) -> BlockOffer:
    """Return an offer of these fields: its number and address, type and shape, begin and shape of parts, and rows."""
    return BlockOffer(
        uuid=source[0],
        address=source[1],
        dtype=kind[0],
        block_shape=tuple(kind[1]),
        parts=tuple(ArrayPart(tuple(begin), tuple(shape)) for begin, shape in parts),
        sizes=tuple(rows[0]),
        num_rows=tuple(rows[1]),
        positions=tuple(positions),
        last_key=last_key,
    )


class PrefillAnswer(Protocol):
    """One computed prompt. The prefill server keeps its blocks until they are transferred or `close` is called.

    Attributes:
        target: address of the server that computed it.
        tokens: the first token of each sequence.
        num_cached_tokens: prompt tokens that were cached there.
    """

    target: str
    tokens: Sequence[FirstToken]
    num_cached_tokens: int

    def parts(self) -> AsyncIterator[KVPart]:
        """Yield its blocks in pieces, or offers of a data port; raise JpagedError if they end early."""

    def finish_pull(self, uuid: int, *, is_received: bool) -> None:
        """End an offer, without waiting. If it was not received, the blocks follow in pieces."""

    def close(self) -> None:
        """Release the server. Idempotent."""


class PrefillServers(Protocol):
    """Servers of the prefill role."""

    async def ask(
        self, request: Request, num_known: int, blocks: BlockFormat, wait_s: float, timeout_s: float
    ) -> PrefillAnswer:
        """Request the prefill of a prompt, and wait for the first token of each sequence.

        Args:
            num_known: leading blocks of the prompt that are not to be sent.
            blocks: blocks that this server can use.
            wait_s: timeout of the first tokens.
            timeout_s: timeout of the whole call, including the blocks.

        Raises:
            TimeoutError: the tokens did not come in time.
            JpagedError: no server could compute it.
        """

    async def close(self) -> None:
        """Close the connections."""
