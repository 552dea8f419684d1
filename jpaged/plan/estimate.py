"""Capacity of a deployment for given lengths: concurrent sequences, tokens per second, their price, and server roles.

A batch of b equal sequences, each with I prompt tokens and O output tokens, takes

    b * I / T prefill steps of T = max_num_batched_tokens, and O decode steps of b rows at a context of I + O / 2

so tokens/s = b * O / (their seconds). b is the number that the pool holds at full length, at most max_num_seqs.

Mixed and disaggregated prefill and decode are compared by the requests per second of copies within latency goals. In
both cases the number b of rows that decode on a copy is given, and the rate of the copy follows from it. T is the
number of prompt tokens of a prefill chunk in a step, d(b) a decode step, m(b, T) one with a chunk in addition, s(T) one
of a chunk alone.

    mixed     q = b I / (O T)              share of steps with a chunk; at most 1
              E = d + q (m - d)            mean time of a step, and between two tokens
              requests/s of a copy = b / (O E)
              first token: ceil(I / T) steps m, after half a step and a queue (M/D/1) of them
              99 of 100 tokens come within m if q is above 0.01, else d
    apart     requests/s of a decode copy = b / (O d(b));  p copies prefill what d copies decode
              first token: ceil(I / T) steps s, after a queue of them
              99 of 100 tokens come within d, or d and the transfer if that is one token of 100
    transfer  bytes of the prompt's full blocks: out of a device over its host link, the network, and in again
              next to it, prefixes over gRPC (not above its rate on one core) and over data ports (the network alone)

The result is for the largest b that meets the goals, and the best power of two for T. The transfer runs after the first
token, so it delays the second one. Nothing was measured: step times come from the plan, and other server costs (host,
network latency, uneven arrivals between copies) are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from jpaged.engine.executor.io import WindowSpec
from jpaged.plan.cost import ASSUMED, StepLoad
from jpaged.plan.step_times import PlannedStepTimes, StepParts

_PREFIXES = (2048, 8192, 32768)
_MAX_BREAK_EVEN_POWER = 14
"""Break-even lengths are powers of two, from 16 to 131072 tokens."""
MAX_LOAD = 0.8
"""Share of the estimated tokens per second that a load may use: above it, waiting times grow without bound."""


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Prompt and output tokens of a sequence."""

    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate for sequences of one pair of lengths on one copy of the model.

    Attributes:
        num_fitting: sequences that the pool holds at full length.
        num_running: those that run concurrently, at most max_num_seqs.
        decode: a step that gives each of them a token.
        prefill: a step of max_num_batched_tokens of their prompts.
        tokens_per_s: output tokens, with the prefill in between; 0 if not a single sequence fits.
    """

    lengths: SequenceLengths
    num_fitting: int
    num_running: int
    decode: StepParts
    prefill: StepParts
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ConcurrencyLimits:
    """Limits of concurrency: blocks and their size, rows and tokens of a step, and the windows of the KV groups."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: Sequence[int | None] = (None,)
    num_sink_tokens: int = 0

    def num_fitting(self, num_tokens: int) -> int:
        """Return the number of sequences of num_tokens tokens that the blocks suffice for."""
        sizes = self.block_size, self.max_num_batched_tokens, self.num_sink_tokens
        reaches = [WindowSpec.of(window, *sizes) for window in self.windows]
        return self.num_blocks // sum(reach.num_kept(num_tokens) for reach in reaches)


def estimate(lengths: SequenceLengths, pool: ConcurrencyLimits, times: PlannedStepTimes) -> Estimate:
    """Estimate the numbers of one copy of the model."""
    input_len, output_len = lengths.input_len, lengths.output_len
    num_fitting = pool.num_fitting(input_len + output_len)
    num_running = min(num_fitting, pool.max_num_seqs)
    num_rows = max(1, num_running)
    decode = times.parts(StepLoad.decoding(num_rows, input_len + output_len / 2))
    prefill = times.parts(StepLoad.prompts(pool.max_num_batched_tokens, input_len))
    batch_s = num_rows * input_len / pool.max_num_batched_tokens * prefill.seconds + output_len * decode.seconds
    return Estimate(lengths, num_fitting, num_running, decode, prefill, num_running * output_len / batch_s)


def mean_lengths(lengths: Sequence[SequenceLengths]) -> SequenceLengths:
    """Return the mean lengths of an even mix, each rounded up."""
    count = len(lengths)
    return SequenceLengths(
        math.ceil(sum(pair.input_len for pair in lengths) / count),
        math.ceil(sum(pair.output_len for pair in lengths) / count),
    )


def get_price(prices: Mapping[str, float], name: str, family: str) -> float | None:
    """Return USD per chip-hour: the target's price, its family's, or the one for all; None if there is none."""
    return prices.get(name, prices.get(family, prices.get("")))


def usd_per_million(price: float, num_chips: int, tokens_per_s: float) -> float | None:
    """Return USD per million output tokens of chips that do nothing else; None for a rate of 0."""
    return price * num_chips / 3600 / tokens_per_s * 1e6 if tokens_per_s else None


@dataclass(frozen=True, slots=True)
class PlannedService:
    """Deployment of a load on slices of one kind.

    Attributes:
        num_slices: slices that carry it with at most MAX_LOAD of their capacity.
        usd_per_hour: price of all their chips; None without a price.
    """

    num_slices: int
    num_chips: int
    usd_per_hour: float | None


def serve(load: float, slice_tokens_per_s: float, chips_per_slice: int, price: float | None) -> PlannedService | None:
    """Return the slices for a load in output tokens per second; None if a slice serves nothing."""
    if slice_tokens_per_s <= 0:
        return None
    num_slices = max(1, math.ceil(load / (slice_tokens_per_s * MAX_LOAD)))
    num_chips = num_slices * chips_per_slice
    return PlannedService(num_slices, num_chips, None if price is None else price * num_chips)


MIN_GAIN = 1.05
"""Minimum gain of disaggregation: two kinds of servers cost more to operate than one."""
_MIN_CHUNK = 128
_RARE = 0.01
_MAX_COPIES = 64
"""Maximum number of copies for which ratios of prefill to decode are tried; more would hardly change the best ratio."""


@dataclass(frozen=True, slots=True)
class PlanGoals:
    """Latency goals, and network speed.

    Attributes:
        ttft_s: mean time to first token.
        itl_s: bound for 99 of 100 inter-token latencies.
        network_bytes_per_s: bandwidth between two servers.
    """

    ttft_s: float
    itl_s: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the copies of a model, at its maximum request rate within the goals.

    Attributes:
        num_prefill: copies that only prefill; 0 if each does both.
        num_decode: the other copies.
        chunk_tokens: prefill tokens in a step.
        requests_per_s: of all copies; 0 if the goals cannot be met, and then the other fields are for the least load.
        num_rows: concurrent rows on a decoding copy.
        transfer_s: transfer of a prompt's blocks, between the first token and the second; 0 without a transfer.
    """

    num_prefill: int
    num_decode: int
    chunk_tokens: int
    requests_per_s: float
    num_rows: int
    ttft_s: float
    itl_s: float
    itl_p99_s: float
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedTransport:
    """Transfer of prefixes between two servers, one prompt at a time.

    Attributes:
        name: grpc, or jax for data ports.
        bytes_per_s: of long prefixes.
        prefixes: (tokens, seconds to transfer them, seconds to compute them).
        break_even_tokens: length from which a transfer is faster than computing; None if it never is.
    """

    name: str
    bytes_per_s: float
    prefixes: tuple[tuple[int, float, float], ...]
    break_even_tokens: int | None


@dataclass(frozen=True, slots=True)
class RoleComparison:
    """Both ways on the same copies.

    Attributes:
        num_copies: at least two.
        transfer_bytes: bytes per prompt.
        transports: ways to transfer prefixes.
    """

    lengths: SequenceLengths
    num_copies: int
    mixed: Way
    apart: Way
    transfer_bytes: float
    transports: tuple[PlannedTransport, ...] = ()

    @property
    def chooses_apart(self) -> bool:
        """True if disaggregation carries clearly more requests."""
        return self.apart.requests_per_s > MIN_GAIN * self.mixed.requests_per_s


def compare(
    lengths: SequenceLengths, pool: ConcurrencyLimits, times: PlannedStepTimes, num_copies: int, goals: PlanGoals
) -> RoleComparison | None:
    """Compare both ways for sequences of these lengths; None if none fits, or the output has one token."""
    most = min(pool.num_fitting(lengths.input_len + lengths.output_len), pool.max_num_seqs)
    if most < 1 or lengths.output_len < 2:
        return None
    model = _Model(lengths, times, goals)
    num_copies = min(max(2, num_copies), _MAX_COPIES)
    chunks = _chunks(pool.max_num_batched_tokens)

    def mixed(chunk: int) -> Way:
        return _most_rows(lambda rows: model.mixed(rows, chunk, num_copies), most, goals)

    def apart(chunk: int, num_prefill: int) -> Way:
        return _most_rows(lambda rows: model.apart(rows, chunk, num_prefill, num_copies - num_prefill), most, goals)

    num_bytes = model.transfer_bytes(pool.block_size)
    return RoleComparison(
        lengths,
        num_copies,
        _best(mixed(chunk) for chunk in chunks),
        _best(apart(chunk, number) for chunk in chunks for number in range(1, num_copies)),
        num_bytes,
        tuple(model.transport(name, pool.max_num_batched_tokens) for name in ("grpc", "jax")),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """The equations of the module, for a given number of rows."""

    lengths: SequenceLengths
    times: PlannedStepTimes
    goals: PlanGoals

    def mixed(self, rows: int, chunk: int, num_copies: int) -> Way | None:
        """Return the result if every copy does both; None if prompts arrive faster than they are computed."""
        input_len, output_len = self.lengths.input_len, self.lengths.output_len
        share = rows * input_len / (output_len * chunk)
        decode_s, both_s = self._decode_s(rows), self._step_s(chunk, rows)
        step_s = decode_s + share * (both_s - decode_s)
        rate = rows / (output_len * step_s)
        wait_s = _queue_s(rate * input_len / chunk * both_s, prompt_s := self._prompt_s(chunk, rows))
        if share > 1 or wait_s is None:
            return None
        p99_s = both_s if share > _RARE else decode_s
        return Way(0, num_copies, chunk, num_copies * rate, rows, step_s / 2 + wait_s + prompt_s, step_s, p99_s)

    def apart(self, rows: int, chunk: int, num_prefill: int, num_decode: int) -> Way | None:
        """Return the disaggregated result; None if prompts arrive faster than they are computed."""
        input_len, output_len = self.lengths.input_len, self.lengths.output_len
        decode_s, transfer_s = self._decode_s(rows), self.transfer_s
        rate = num_decode * rows / (output_len * decode_s)
        use = rate / num_prefill * input_len / chunk * self._step_s(chunk, 0)
        wait_s = _queue_s(use, prompt_s := self._prompt_s(chunk, 0))
        if wait_s is None:
            return None
        share = 1 / (output_len - 1)
        p99_s = decode_s + transfer_s if share > _RARE else decode_s
        mean_s = decode_s + share * transfer_s
        return Way(num_prefill, num_decode, chunk, rate, rows, wait_s + prompt_s, mean_s, p99_s, transfer_s)

    def transfer_bytes(self, block_size: int) -> float:
        """Return the bytes of the keys and values of a prompt's full blocks."""
        return self.lengths.input_len // block_size * block_size * self.times.roofline.shape.kv_bytes_per_token

    @property
    def transfer_s(self) -> float:
        """Seconds to transfer a prompt's blocks, with all stages in sequence."""
        roofline = self.times.roofline
        num_bytes = self.lengths.input_len * roofline.shape.kv_bytes_per_token
        num_links = roofline.num_devices * self.times.num_context_parts
        host_s = num_bytes / (num_links * roofline.hardware.host_bytes_per_s * ASSUMED.host_link_efficiency)
        return 2 * host_s + num_bytes / self.goals.network_bytes_per_s

    def transport(self, name: str, chunk: int) -> PlannedTransport:
        """Return what a transport takes for prefixes of several lengths, next to prefill on an idle copy."""
        bytes_per_token = self.times.roofline.shape.kv_bytes_per_token
        network = self.goals.network_bytes_per_s
        host_s = (replace(self, lengths=SequenceLengths(1, 2)).transfer_s - bytes_per_token / network) / bytes_per_token
        byte_s = 1 / network if name == "jax" else host_s + 1 / min(network, ASSUMED.grpc_bytes_per_s)

        def seconds(num_tokens: int) -> tuple[int, float, float]:
            model = replace(self, lengths=SequenceLengths(num_tokens, 2))
            moved_s = ASSUMED.offer_s + num_tokens * bytes_per_token * byte_s
            return num_tokens, moved_s, model._prompt_s(chunk, 0)

        lengths = (16 << power for power in range(_MAX_BREAK_EVEN_POWER))
        first = next((count for count, moved_s, computed_s in map(seconds, lengths) if moved_s < computed_s), None)
        return PlannedTransport(name, 1 / byte_s, tuple(map(seconds, _PREFIXES)), first)

    def _decode_s(self, rows: int) -> float:
        return self.times.step_s(self._decoding(rows))

    def _decoding(self, rows: int) -> StepLoad:
        return StepLoad.decoding(rows, self.lengths.input_len + self.lengths.output_len / 2)

    def _step_s(self, chunk: int, rows: int) -> float:
        prompts = StepLoad.prompts(chunk, self.lengths.input_len)
        if not rows:
            return self.times.step_s(prompts)
        pairs = zip(astuple(prompts), astuple(self._decoding(rows)), strict=True)
        return self.times.step_s(StepLoad(*(one + other for one, other in pairs)))

    def _prompt_s(self, chunk: int, rows: int) -> float:
        """Return the seconds of a prompt without waiting; a prompt shorter than a chunk gets a shorter step."""
        input_len = self.lengths.input_len
        return math.ceil(input_len / chunk) * self._step_s(min(chunk, input_len), rows)


def _queue_s(use: float, service_s: float) -> float | None:
    """Return the mean wait of an M/D/1 queue; None if it is overloaded."""
    return None if use >= 1 else use * service_s / (2 * (1 - use))


def _most_rows(way: Callable[[int], Way | None], most: int, goals: PlanGoals) -> Way:
    """Return the way with the most rows that meets the goals; if none does, that of one row with a rate of 0."""

    def keeps(found: Way | None) -> bool:
        return found is not None and found.ttft_s <= goals.ttft_s and found.itl_p99_s <= goals.itl_s

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keeps(way(middle)) else (low, middle - 1)
    found = way(max(low, 1))
    if found is None:
        return Way(0, 0, 0, 0.0, 0, math.inf, math.inf, math.inf)
    if low:
        return found
    return replace(found, requests_per_s=0.0)


def _best(ways: Iterable[Way]) -> Way:
    return max(ways, key=lambda way: (way.requests_per_s, -way.itl_p99_s, -way.ttft_s))


def _chunks(max_num_batched_tokens: int) -> list[int]:
    """Return the chunk sizes to try: powers of two, and the maximum of a step."""
    powers = (1 << power for power in range(_MIN_CHUNK.bit_length() - 1, max_num_batched_tokens.bit_length()))
    return sorted({max_num_batched_tokens, *(power for power in powers if power <= max_num_batched_tokens)})


def lines(found: RoleComparison, goals: PlanGoals) -> list[str]:
    """Return a comparison as text, with the recommendation."""
    mixed, apart, lengths = found.mixed, found.apart, found.lengths
    text = [
        f"roles for {lengths.input_len} + {lengths.output_len} tokens on {found.num_copies} copies: time to first "
        f"token up to {goals.ttft_s * 1e3:g} ms (mean), inter-token latency up to {goals.itl_s * 1e3:g} ms (p99)",
        f"  every copy does both: {_way_line(mixed)}",
        f"  {apart.num_prefill} prefill + {apart.num_decode} decode: {_way_line(apart)}",
        f"  a prompt's blocks are {found.transfer_bytes / 1e6:.1f} MB, transferred in {apart.transfer_s * 1e3:.1f} "
        f"ms at {goals.network_bytes_per_s * 8 / 1e9:g} Gbit/s between servers, which delays the second token",
    ]
    text += [_transport_line(one) for one in found.transports]
    if not (mixed.requests_per_s or apart.requests_per_s):
        return [*text, "  choose: neither meets the goals"]
    gain = apart.requests_per_s / mixed.requests_per_s if mixed.requests_per_s else math.inf
    if found.chooses_apart:
        what = f"--role prefill on {apart.num_prefill} and --role decode on {apart.num_decode} of {found.num_copies}"
    else:
        what = "--role both"
    times = "only they meet the goals" if math.isinf(gain) else f"apart carries {gain:.2f} times as many requests"
    return [*text, f"  choose: {what}; {times}"]


def _transport_line(transport: PlannedTransport) -> str:
    times = ", ".join(
        f"{count // 1024}k tokens {moved_s * 1e3:.1f} ms (computed {computed_s * 1e3:.1f})"
        for count, moved_s, computed_s in transport.prefixes
    )
    least = transport.break_even_tokens
    gain = "never faster than computing" if least is None else f"faster than computing from {least} tokens"
    return f"  {transport.name}: {transport.bytes_per_s / 1e9:.2f} GB/s; {times}; {gain}"


def _way_line(way: Way) -> str:
    if not way.requests_per_s:
        if math.isinf(way.ttft_s):
            return "does not meet the goals: one row's prompts take longer than its output"
        return (
            f"does not meet the goals: one row has time to first token {way.ttft_s * 1e3:.1f} ms, inter-token latency "
            f"{way.itl_p99_s * 1e3:.2f} ms (p99)"
        )
    return (
        f"{way.requests_per_s:.2f} requests/s, {way.num_rows} rows per copy, chunks of {way.chunk_tokens}; time to "
        f"first token {way.ttft_s * 1e3:.1f} ms (mean), inter-token latency {way.itl_s * 1e3:.2f} ms (mean), "
        f"{way.itl_p99_s * 1e3:.2f} ms (p99)"
    )
