"""Settings every test shares."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Put jax on the CPU unless the caller names a platform; it reads the variable once, when it is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool warns after a fork
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a download is broken
