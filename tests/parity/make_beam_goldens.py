"""Writes beam_goldens.json with transformers and torch: `python -m tests.parity.make_beam_goldens` (needs torch)."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.models.tiny import write_checkpoint
from tests.parity.beam_cases import CHECKPOINT, GOLDENS, beam_cases, found_by_transformers


def main() -> None:
    """Writes every case, and prints how long the sequences are: some must end early."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(CHECKPOINT, Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        searches = {case.name: found_by_transformers(model, case) for case in beam_cases()}
    for name, found in searches.items():
        print(name, [len(sequence.token_ids) for sequence in found])
    document = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "searches": {name: [dataclasses.asdict(sequence) for sequence in found] for name, found in searches.items()},
    }
    GOLDENS.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
