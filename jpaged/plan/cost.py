"""Roofline of a step: the larger of bytes over bandwidth and FLOPs over peak.

    bytes  = weights (used experts only) + KV of every row's context / gather efficiency              read once a step
             + recurrent state of every row                                                read and written once a step
    FLOPs  = 2 * params (chosen experts, all adapters) * tokens + 4 * layers * query width * (query, key) pairs
    step   = max(bytes / (devices * bandwidth * eff), FLOPs / (devices * peak * eff))

Every device of a model has a share of each layer, so bytes and FLOPs are divided by the number of devices. Other costs
depend on the system: host work and sums over devices (`jpaged.plan.step_times`; for the system that the paper
measured, `jpaged.plan.simulator.deployment`). If the cycles of attention are known, the roofline covers only the
matrix products.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumed values that no data sheet states.

    Attributes:
        bandwidth_efficiency: share of the HBM's peak, for weights and long runs of KV memory.
        flops_efficiency: share of the peak, for the matrix products.
        host_link_efficiency: share of the link's peak, for long transfers.
        step_overhead_s: host work and kernel launches of a step that do not overlap with the device.
        all_reduce_s: one all-reduce between the devices of one model; there are two per layer.
        transfer_latency_s: cost of a transfer over the host link in addition to its bytes. A block is 2 * num_layers
            transfers (its keys and its values in each layer), as in the system that the paper measured.
        half_rate_run_bytes: gathered KV memory is read at half the bandwidth when its consecutive run (one head's part
            of a block) has this many bytes: the efficiency is run / (run + this). 942 makes blocks of 16 with heads of
                128
            slower by 23 percent than contiguous memory, the middle of the 20 to 26 that the PagedAttention paper
                measured
            for its kernel (section 7.1). It is an assumption that other sizes follow the same curve.
        memory_utilization: share of HBM for weights and KV pool if no pool size is given.
        grpc_bytes_per_s: blocks sent between two servers over gRPC, bound by a core that hashes and copies them.
        offer_s: latency of a transfer between servers.
    """

    bandwidth_efficiency: float = 0.7
    flops_efficiency: float = 0.5
    host_link_efficiency: float = 0.8
    step_overhead_s: float = 0.005
    all_reduce_s: float = 20e-6
    transfer_latency_s: float = 5e-6
    half_rate_run_bytes: float = 942.0
    memory_utilization: float = 0.9
    grpc_bytes_per_s: float = 0.3e9
    offer_s: float = 0.005


ASSUMED = Assumptions()
HBM_EFFICIENCY, PRODUCTS_EFFICIENCY = 0.9, 0.7
"""Shares of the bandwidth for weights, and of the peak for products, if attention is computed separately.

Products of 2048 tokens of Llama 3.1 8B took 1.37 ms a layer of v6e by libtpu's schedule, 0.71 of the peak. The 0.9 of
the HBM's peak for long reads is an assumption.
"""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Workload of one step.

    Attributes:
        num_rows: sequences that sample a token.
        num_tokens: tokens of all rows.
        num_kv_tokens: sum of the context lengths of all rows.
        num_pairs: (query, key) pairs that attention computes, over all rows, in one head of one layer.
        num_decoding: rows of a single token.
        num_decoding_kv_tokens: sum of their context lengths.
    """

    num_rows: int
    num_tokens: int
    num_kv_tokens: float
    num_pairs: float
    num_decoding: int = 0
    num_decoding_kv_tokens: float = 0.0

    @classmethod
    def decoding(cls, num_rows: int, context_len: float) -> StepLoad:
        """Return the load of num_rows decoding rows with contexts of this length."""
        num_kv_tokens = num_rows * context_len
        return cls(num_rows, num_rows, num_kv_tokens, num_kv_tokens, num_rows, num_kv_tokens)

    @classmethod
    def prompts(cls, num_tokens: int, prompt_len: float) -> StepLoad:
        """Return the load of num_tokens prefill tokens of prompts of this length, at the mean of their positions."""
        num_rows = max(1.0, num_tokens / prompt_len)
        return cls(int(num_rows), num_tokens, num_rows * prompt_len / 2, num_tokens * prompt_len / 2)

    def in_parts(self, num_parts: int) -> StepLoad:
        """Return the load of one context-parallel part: all tokens, and a share of their contexts."""
        return dataclasses.replace(
            self,
            num_kv_tokens=self.num_kv_tokens / num_parts,
            num_pairs=self.num_pairs / num_parts,
            num_decoding_kv_tokens=self.num_decoding_kv_tokens / num_parts,
        )

    def in_microbatches(self, num: int) -> StepLoad:
        """Return the load of one of equal parts of the tokens."""
        return StepLoad(
            num_rows=-(-self.num_rows // num),
            num_tokens=-(-self.num_tokens // num),
            num_kv_tokens=self.num_kv_tokens / num,
            num_pairs=self.num_pairs / num,
            num_decoding=self.num_decoding // num,
            num_decoding_kv_tokens=self.num_decoding_kv_tokens / num,
        )

    def within(self, window: int | None) -> StepLoad:
        """Return the load of a layer whose queries see `window` tokens, including themselves; None for all.

        It assumes that decoding rows are equally long, and so are chunks and the contexts of their queries.
        """
        if window is None:
            return self
        decoding = min(self.num_decoding_kv_tokens, self.num_decoding * window)
        num_queries, num_chunks = self.num_tokens - self.num_decoding, self.num_rows - self.num_decoding
        kv_tokens = min(self.num_kv_tokens - self.num_decoding_kv_tokens, num_queries + num_chunks * window)
        num_pairs = min(self.num_pairs - self.num_decoding_kv_tokens, num_queries * window)
        return dataclasses.replace(
            self,
            num_kv_tokens=kv_tokens + decoding,
            num_pairs=num_pairs + decoding,
            num_decoding_kv_tokens=decoding,
        )

    def seen_by(self, windows: Sequence[int | None]) -> StepLoad:
        """Return the mean load of layers with these windows; without any window they see all tokens."""
        if not any(windows):
            return self
        seen = [(self.within(window), count / len(windows)) for window, count in Counter(windows).items()]
        return dataclasses.replace(
            self,
            num_kv_tokens=sum(load.num_kv_tokens * share for load, share in seen),
            num_pairs=sum(load.num_pairs * share for load, share in seen),
            num_decoding_kv_tokens=sum(load.num_decoding_kv_tokens * share for load, share in seen),
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a model's step, on all its devices together: what it reads and computes.

    Attributes:
        num_params: parameters that are multiplied with.
        query_width: query heads times head dimension; if values are narrower than keys, times the mean of both. It is
            the mean over all layers if some are recurrent.
        weight_bytes: bytes of weights read in a step.
        kv_bytes_per_token: all layers.
        head_params: those of num_params that only sampled rows are multiplied with.
        expert_params: those of num_params that belong to experts; each token uses a share of them.
        expert_share: that share.
        adapter_params: parameters of the adapters of all slots, not in num_params; every token is multiplied with them,
            and weight_bytes includes them.
        windows: tokens that the queries of each layer see; empty if they see all.
        fp8_share: share of the layers' parameters that rows of 8-bit floats are multiplied with, at twice the peak.
        state_bytes: recurrent state of a sequence, all layers, which a step reads and writes.
    """

    num_params: float
    num_layers: int
    query_width: int
    weight_bytes: float
    kv_bytes_per_token: float
    head_params: float = 0.0
    expert_params: float = 0.0
    expert_share: float = 1.0
    adapter_params: float = 0.0
    windows: tuple[int | None, ...] = ()
    fp8_share: float = 0.0
    state_bytes: float = 0.0

    @property
    def token_params(self) -> float:
        """Parameters that a token is multiplied with, without those of the output matrix."""
        own = self.num_params - self.head_params - self.expert_params * (1 - self.expert_share)
        return own + self.adapter_params

    def read_bytes(self, num_tokens: float) -> float:
        """Return the bytes of weights read for num_tokens tokens, which choose their experts independently."""
        unread = self.expert_params / (self.num_params + self.adapter_params) * (1 - self.expert_share) ** num_tokens
        return self.weight_bytes * (1 - unread)

    def moved_bytes(self, num_tokens: float, num_rows: float) -> float:
        """Return the bytes of weights read for num_tokens tokens, and of states read and written for num_rows rows."""
        return self.read_bytes(num_tokens) + 2 * self.state_bytes * num_rows


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a model split over devices.

    Attributes:
        gather_efficiency: share of the bandwidth for reading keys and values; 1 if they are in long runs.
    """

    shape: ModelShape
    hardware: Hardware
    num_devices: int
    assumptions: Assumptions = ASSUMED
    gather_efficiency: float = 1.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that all devices together read."""
        return self.num_devices * self.hardware.hbm_bytes_per_s * self.assumptions.bandwidth_efficiency

    def step_s(self, load: StepLoad) -> float:
        """Return the seconds of a step."""
        load = load.seen_by(self.shape.windows)
        return max(self.bytes_s(load.num_kv_tokens, load.num_tokens, load.num_rows), self.flops_s(load))

    def products_s(self, load: StepLoad) -> float:
        """Return the seconds of weights, states and products, without attention, if that is computed separately."""
        devices, shape = self.hardware, self.shape
        num_bytes = shape.moved_bytes(load.num_tokens, load.num_rows)
        bytes_s = num_bytes / (self.num_devices * devices.hbm_bytes_per_s * HBM_EFFICIENCY)
        return max(bytes_s, self._product_flops(load) / (self.num_devices * devices.flops * PRODUCTS_EFFICIENCY))

    def bytes_s(self, num_kv_tokens: float, num_tokens: float = math.inf, num_rows: float = 0) -> float:
        """Return the seconds to move weights for num_tokens, keys and values of num_kv_tokens, and states of rows."""
        kv_bytes = num_kv_tokens * self.shape.kv_bytes_per_token / self.gather_efficiency
        return (self.shape.moved_bytes(num_tokens, num_rows) + kv_bytes) / self.bytes_per_s

    def flops_s(self, load: StepLoad) -> float:
        """Return the seconds of the matrix products, including those of attention."""
        flops = self._product_flops(load) + 4 * self.shape.num_layers * self.shape.query_width * load.num_pairs
        return flops / (self.num_devices * self.hardware.flops * self.assumptions.flops_efficiency)

    def _product_flops(self, load: StepLoad) -> float:
        """Return the FLOPs at the 16-bit peak; products in 8 bits count half."""
        shape = self.shape
        halved = (shape.token_params - shape.adapter_params) * shape.fp8_share / 2
        return 2 * ((shape.token_params - halved) * load.num_tokens + shape.head_params * load.num_rows)
