"""Which prompts a decode server has computed elsewhere, and why it computes others itself."""

from __future__ import annotations

from jpaged.types import Request


def why_here(request: Request, min_tokens: int) -> str | None:
    """Return why a prompt is computed here, by what the request asks for; None where another server may do it.

    What is told of a prompt would have to travel as well, and state that is more than tokens (beams, the sums of a
    best_of, budgets of thinking, grammars that close in time) does not.

    Args:
        min_tokens: shorter prompts stay; of longer ones those that are cached, which only their blocks can tell.
    """
    sampling = request.sampling
    if len(request.prompt_token_ids) < min_tokens:
        return "short"
    if not sampling.use_prefix_cache:
        return "uncached"
    if sampling.beam_width or sampling.num_samples > sampling.n:
        return "ranked"
    if request.told_from is not None or request.pooling is not None:
        return "told_of"
    if request.continued:
        return "continued"
    outputs = sampling.structured_outputs
    if request.thinking is not None or (outputs is not None and outputs.always_complete):
        return "budget"
    return None
