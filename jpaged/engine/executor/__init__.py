"""Executor interface: the shapes of one step and the methods of a device. Owned by the engine, implemented below it.

    forward(StepInputs) ── hidden ──> sample(hidden, SamplingInputs) ── handle ──> collect(handle) ──> StepOutputs
    decode(StepInputs, SamplingInputs, ...), the two in a loop ─────── handle ──┤
    decode_interruptibly(StepInputs, ...), and a DecodeInterrupt ───── handle ──┤
    decode_with_masks(StepInputs, SamplingInputs, ...), and a MaskChannel ─ handle ──┤
    speculate(StepInputs, SamplingInputs, ...), with a draft model ─── handle ──┘

The engine decides, the executor computes. Padded numpy arrays go in and come out; intermediate arrays stay on the
device, and no call waits before `collect`. The executor never changes its inputs, and the engine never sees a device
array.

    T  tokens packed in the step, padded to a bucket       S  rows of a step, always max_num_seqs
    M  width of a block-table row                          R  rows that the sampler runs on, padded to a bucket
    G  KV groups, each with separate block tables          K  top log-probabilities reported
    X  token ids that a row may ban
    n  tokens that a row samples in a dispatch: 1, one in each step, or the number of accepted tokens

io.py       sizes, sampling parameters of each row, inputs and outputs of a step
aux_io.py   inputs and outputs of an aux call
verbs.py    the executor's methods, and the interface of a data port
"""

from jpaged.engine.executor.io import (
    BANNED_WIDTH,
    BEYOND_TOKENS,
    F32,
    I32,
    MAX_NUM_ROUNDS,
    MAX_NUM_STEPS,
    MIN_BUCKET,
    NULL_BLOCK,
    ROW_DTYPE,
    ROW_FIELDS,
    TOP_WIDTH,
    BlockMoves,
    Bool,
    BucketTable,
    Detail,
    DeviceRates,
    ExpertStats,
    Geometry,
    Move,
    RowField,
    SamplingInputs,
    Speculated,
    StepInputs,
    StepOutputs,
    num_pairs,
    random_columns,
    row_lists,
)
from jpaged.engine.executor.verbs import (
    COMPILER_THREAD,
    SLEEP_TAGS,
    ArrayPart,
    BlockArrays,
    BlockOffer,
    BlockPort,
    BlockPull,
    DecodeInterrupt,
    Executor,
    Handle,
    Hidden,
    HostBlocks,
    MaskChannel,
    Progress,
    Sleeper,
    SleepTag,
    StepDirective,
    WeightUpdate,
)

__all__ = [
    "BANNED_WIDTH",
    "BEYOND_TOKENS",
    "COMPILER_THREAD",
    "F32",
    "I32",
    "MAX_NUM_ROUNDS",
    "MAX_NUM_STEPS",
    "MIN_BUCKET",
    "NULL_BLOCK",
    "ROW_DTYPE",
    "ROW_FIELDS",
    "SLEEP_TAGS",
    "TOP_WIDTH",
    "ArrayPart",
    "BlockArrays",
    "BlockMoves",
    "BlockOffer",
    "BlockPort",
    "BlockPull",
    "Bool",
    "BucketTable",
    "DecodeInterrupt",
    "Detail",
    "DeviceRates",
    "Executor",
    "ExpertStats",
    "Geometry",
    "Handle",
    "Hidden",
    "HostBlocks",
    "MaskChannel",
    "Move",
    "Progress",
    "RowField",
    "SamplingInputs",
    "SleepTag",
    "Sleeper",
    "Speculated",
    "StepDirective",
    "StepInputs",
    "StepOutputs",
    "WeightUpdate",
    "num_pairs",
    "random_columns",
    "row_lists",
]
