"""The evaluation of "Efficient Memory Management for LLM Serving with PagedAttention" (Kwon et al., SOSP 2023)."""
