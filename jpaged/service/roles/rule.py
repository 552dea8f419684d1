"""Rule that decides which prompts a decode server sends to prefill servers."""

from __future__ import annotations

from jpaged.types import Request


def why_here(request: Request, min_tokens: int) -> str | None:
    """Return the reason to compute a prompt on this server; None if a prefill server may compute it.

    Prompt log-probabilities and hidden states are not transferred, nor is state beyond tokens: beams, sums of best_of,
    thinking budgets, grammars with `always_complete`.

    Args:
        min_tokens: shorter prompts stay. Longer ones may also stay if cached, which only their blocks show.
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
