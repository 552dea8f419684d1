"""Faults of drafts: what is proposed, what is run of it, and what of that counts."""

from __future__ import annotations

from tests.mutation.planting import Fault

LIVES = ("test_lives.py",)
DRAFTING = ("speculative/test_drafting.py",)
ROUNDS = ("speculative/test_rounds.py",)

DRAFT_FAULTS = (
    Fault(
        "a token behind a proposal that was not drawn is taken in",
        "speculative/drafts.py",
        "return cls(schedule, device_rows, done.num_accepted)",
        "return cls(schedule, device_rows, num_usable_r.tolist())",
        DRAFTING,
    ),
    Fault(
        "what is sampled behind a proposal is drawn for its place",
        "scheduler/output.py",
        "start=start + number,\n                num_tokens=1,",
        "start=start,\n                num_tokens=1,",
        DRAFTING,
    ),
    Fault(
        "a row behind a proposal may end before min_tokens",
        "scheduler/output.py",
        "output_index=start + number + 1 - sequence.num_prompt_tokens",
        "output_index=start + number + 2 - sequence.num_prompt_tokens",
        DRAFTING,
    ),
    Fault(
        "blocks of proposals that were not drawn are kept",
        "speculative/drafts.py",
        "            self.memory.rewind(sequence)\n",
        "",
        DRAFTING,
    ),
    Fault(
        "the row of a sequence stays where the step left it",
        "speculative/drafts.py",
        "self.rows.grown(sequence, num_accepted)",
        "self.rows.grown(sequence)",
        DRAFTING,
    ),
    Fault(
        "a draft takes blocks that nobody has",
        "speculative/drafts.py",
        "if count > 0 and self.memory.can_grow([(one.sequence, count)]):",
        "if count > 0:",
        LIVES,
    ),
    Fault(
        "proposals go beyond the last token",
        "speculative/drafts.py",
        "token_ids = token_ids[: max(0, num_left)]",
        "token_ids = list(token_ids)",
        DRAFTING,
    ),
    Fault(
        "a row behind a proposal follows the grammar of the row before",
        "structured_output.py",
        "of_row = row.grammar if is_ahead else row.sequence.grammar",
        "of_row = row.sequence.grammar",
        ("test_grammars.py",),
    ),
    Fault(
        "requests whose tokens are counted have drafts",
        "speculative/drafts.py",
        "sampling.beam_width or sampling.needs_counts or",
        "sampling.beam_width or",
        DRAFTING,
    ),
    Fault(
        "a draft model is taken to have seen what comes from the host",
        "speculative/draft_model.py",
        "        elif moves.move is Move.SWAP_IN:\n            self._are_seen[moves.destinations] = False\n",
        "",
        ("speculative/test_seen_blocks.py",),
    ),
    Fault(
        "a draft model is taken to have seen what several plain steps ran",
        "speculative/draft_model.py",
        "            self._are_seen[ids_m[begin:end]] = False\n",
        "            pass\n",
        ROUNDS,
    ),
    Fault(
        "rows do not know of the blocks that they have for rounds",
        "speculative/drafts.py",
        "            self.rows.grown(sequence)\n",
        "",
        ROUNDS,
    ),
    Fault(
        "rows stay where rounds began",
        "results.py",
        "            self.scheduler.drafts.ran(decodes.groups[row], decodes.sequences[row], count - 1)\n",
        "            pass\n",
        ROUNDS,
    ),
    Fault(
        "a proposer hears of a token twice",
        "speculative/drafter.py",
        "        self._num_reported[sequence] = len(sequence.token_ids)\n",
        "        self._num_reported[sequence] = num_told\n",
        DRAFTING,
    ),
)
