"""Policy: who runs, in which blocks, and what comes of it. Plain Python and numpy; never imports jax."""
