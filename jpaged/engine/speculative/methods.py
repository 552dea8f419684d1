"""Creation of the proposer that the options name."""

from __future__ import annotations

from jpaged.config import SpeculativeOptions
from jpaged.engine.speculative.ngram import NgramProposer
from jpaged.engine.speculative.proposer import Proposer
from jpaged.engine.speculative.suffix import SuffixProposer
from jpaged.errors import InternalError


def make_proposer(options: SpeculativeOptions) -> Proposer:
    """Create the proposer of a method that runs on the host.

    Raises:
        InternalError: the method runs on the device.
    """
    if options.method == "ngram":
        return NgramProposer.of(options)
    if options.method == "suffix":
        return SuffixProposer.of(options)
    raise InternalError(f"{options.method} proposes on the device, not on the host")
