"""What the engine asks of a device: the shapes of one step, and its verbs. Owned by the engine, implemented below it.

    forward(StepInputs) ── hidden ──> sample(hidden, SamplingInputs) ── handle ──> collect(handle) ──> StepOutputs
    decode(StepInputs, SamplingInputs, ...), the two again and again ─ handle ──┤
    decode_fed(StepInputs, SamplingInputs, ...), with a MaskFeed ───── handle ──┤
    speculate(StepInputs, SamplingInputs, ...), with a draft model ─── handle ──┘

The engine decides, the executor computes. Padded numpy arrays go down and come back; what is in between stays on the
device, and nothing waits before `collect`. The executor never changes what it was told to run, and the engine never
sees a device array.

    T  tokens packed in the step, padded to a bucket       S  rows of a step, always max_num_seqs
    M  width of a block-table row                          R  rows that the sampler runs on, padded to a bucket
    G  KV groups, each with block tables of its own        K  top log-probabilities reported
    X  token ids that a row may ban
    n  tokens that a row samples in a dispatch: 1, one in each of its steps, or as many as were accepted

shapes.py    sizes, and how long the device takes for what
record.py    what a field of a record is
rows.py      how each row's next token is sampled
edits.py     how logits are changed before
feed.py      masks for steps that are under way
telling.py   what is asked of a step besides samples
steps.py     what goes into a step, and what comes out
verbs.py     the verbs
"""

from jpaged.engine.executor.feed import MaskFeed, Verdict
from jpaged.engine.executor.record import BEYOND_TOKENS, RowField
from jpaged.engine.executor.rows import (
    BANNED_WIDTH,
    ROW_DTYPE,
    ROW_FIELDS,
    TOP_WIDTH,
    Detail,
    SamplingInputs,
    random_columns,
    row_lists,
)
from jpaged.engine.executor.shapes import (
    F32,
    I32,
    MIN_BUCKET,
    Bool,
    BucketTable,
    DeviceRates,
    Geometry,
)
from jpaged.engine.executor.steps import (
    MAX_NUM_ROUNDS,
    MAX_NUM_STEPS,
    NULL_BLOCK,
    BlockMoves,
    Move,
    Speculated,
    StepInputs,
    StepOutputs,
    num_pairs,
)
from jpaged.engine.executor.verbs import (
    Executor,
    Handle,
    Hidden,
    HostBlocks,
    Progress,
)

__all__ = [
    "BANNED_WIDTH",
    "BEYOND_TOKENS",
    "F32",
    "I32",
    "MAX_NUM_ROUNDS",
    "MAX_NUM_STEPS",
    "MIN_BUCKET",
    "NULL_BLOCK",
    "ROW_DTYPE",
    "ROW_FIELDS",
    "TOP_WIDTH",
    "BlockMoves",
    "Bool",
    "BucketTable",
    "Detail",
    "DeviceRates",
    "Executor",
    "Geometry",
    "Handle",
    "Hidden",
    "HostBlocks",
    "MaskFeed",
    "Move",
    "Progress",
    "RowField",
    "SamplingInputs",
    "Speculated",
    "StepInputs",
    "StepOutputs",
    "Verdict",
    "num_pairs",
    "random_columns",
    "row_lists",
]
