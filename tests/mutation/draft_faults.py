"""Faults of drafts: what is proposed, what is run of it, and what of that counts."""

from __future__ import annotations

from tests.mutation.planting import Fault

LIVES = ("test_lives.py",)
DRAFTING = ("speculative/test_drafting.py",)
ROUNDS = ("speculative/test_rounds.py",)
STATES = ("kv_cache/test_state_checkpoints.py", "kv_cache/test_state_slots.py")

DRAFT_FAULTS = (
    Fault(
        "tokens after a rejected draft token are accepted",
        "speculative/drafts.py",
        "return cls(schedule, device_rows, done.num_accepted)",
        "return cls(schedule, device_rows, num_usable_r.tolist())",
        DRAFTING,
    ),
    Fault(
        "draft tokens run at the position of the token before them",
        "scheduler/output.py",
        "start=start + number,\n                num_tokens=1,",
        "start=start,\n                num_tokens=1,",
        DRAFTING,
    ),
    Fault(
        "a row after a draft token may end before min_tokens",
        "scheduler/output.py",
        "output_index=start + number + 1 - sequence.num_prompt_tokens",
        "output_index=start + number + 2 - sequence.num_prompt_tokens",
        DRAFTING,
    ),
    Fault(
        "blocks of rejected draft tokens are kept",
        "speculative/drafts.py",
        "            self.memory.rewind(sequence)\n",
        "",
        DRAFTING,
    ),
    Fault(
        "a row does not advance over its accepted draft tokens",
        "speculative/drafts.py",
        "self.rows.grown(sequence, num_accepted)",
        "self.rows.grown(sequence)",
        DRAFTING,
    ),
    Fault(
        "a draft is scheduled without free blocks",
        "speculative/drafts.py",
        "if count > 0 and self.memory.can_grow([(one.sequence, count)]):",
        "if count > 0:",
        LIVES,
    ),
    Fault(
        "draft tokens exceed the number of tokens left",
        "speculative/drafts.py",
        "token_ids = token_ids[: max(0, num_left)]",
        "token_ids = list(token_ids)",
        DRAFTING,
    ),
    Fault(
        "a draft token's row uses the grammar state before the draft",
        "structured_output.py",
        "of_row = row.grammar if is_ahead else row.sequence.grammar",
        "of_row = row.sequence.grammar",
        ("test_grammars.py",),
    ),
    Fault(
        "requests that need token counts get draft tokens",
        "speculative/drafts.py",
        "sampling.beam_width or sampling.needs_counts or",
        "sampling.beam_width or",
        DRAFTING,
    ),
    Fault(
        "an MTP layer is shown tokens again, as a draft model",
        "speculative/draft_model.py",
        "options.has_head",
        "options.method == 'eagle3'",
        ROUNDS,
    ),
    Fault(
        "the draft model counts swapped-in blocks as computed",
        "speculative/draft_model.py",
        "        elif moves.move is Move.SWAP_IN:\n            self._are_seen[moves.destinations] = False\n",
        "",
        ("speculative/test_seen_blocks.py",),
    ),
    Fault(
        "the draft model counts blocks of plain multi-step dispatches as computed",
        "speculative/draft_model.py",
        "            self._are_seen[ids_m[begin:end]] = False\n",
        "            pass\n",
        ROUNDS,
    ),
    Fault(
        "the decode batch misses the blocks for draft-model rounds",
        "speculative/drafts.py",
        "            self.rows.grown(sequence)\n",
        "",
        ROUNDS,
    ),
    Fault(
        "rows do not advance after draft-model rounds",
        "results.py",
        "            self.scheduler.drafts.ran(decodes.groups[row], decodes.sequences[row], count - 1, slot)\n",
        "            pass\n",
        ROUNDS,
    ),
    Fault(
        "a proposer receives a token twice",
        "speculative/drafter.py",
        "        self._num_reported[sequence] = len(sequence.token_ids)\n",
        "        self._num_reported[sequence] = num_told\n",
        DRAFTING,
    ),
    Fault(
        "the recurrent state of a rejected draft token is kept",
        "speculative/drafts.py",
        "state_slot = kv.draft_slots[num_accepted - 1] if num_accepted else kv.state_slot",
        "state_slot = kv.draft_slots[-1]",
        STATES,
    ),
    Fault(
        "the recurrent state does not advance over accepted draft tokens",
        "speculative/drafts.py",
        "state_slot = kv.draft_slots[num_accepted - 1] if num_accepted else kv.state_slot",
        "state_slot = kv.state_slot",
        STATES,
    ),
    Fault(
        "the recurrent state does not advance in draft-model rounds",
        "results.py",
        "slot = rounds.state_slots_r.item(row)",
        "slot = decodes.sequences[row].kv.state_slot",
        STATES,
    ),
    Fault(
        "a decoding row reads the recurrent state before its accepted draft tokens",
        "scheduler/decode_batch.py",
        "            self._state_sources_s[row] = sequence.kv.state_slot\n",
        "            pass\n",
        STATES,
    ),
    Fault(
        "a draft token with recurrent state continues the row of another sequence",
        "speculative/drafts.py",
        "            schedule.place_drafts()\n",
        "            pass\n",
        STATES,
    ),
    Fault(
        "the slots for recurrent state of rejected draft tokens are kept",
        "kv_cache/blocks.py",
        "            self._drop(kv.state_slot if draft == slot else draft)\n",
        "            pass\n",
        STATES,
    ),
    Fault(
        "a draft token takes the recurrent state of a pinned prefix",
        "kv_cache/blocks.py",
        "for key, slot in self._checkpoints.items() if not self._pins[key])",
        "for key, slot in self._checkpoints.items())",
        STATES,
    ),
)
