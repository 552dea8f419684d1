"""Settings every test shares."""

import os

import pytest

# XLA's code generator does little of its optimising: the suite spends its time in compiles, and those of
# tests/models took 43 s of CPU so, instead of 107 s. The long tests run what a server runs.
QUICK_XLA_FLAG = "--xla_backend_optimization_level=0"

# What runs on a mesh is tested on virtual CPU devices; a test on one device is as quick among eight.
DEVICES_XLA_FLAG = "--xla_force_host_platform_device_count=8"


def pytest_configure(config: pytest.Config) -> None:
    """Set what libraries read once, when they are imported; what the caller has set stays."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool warns after a fork
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a download is broken
    # Of each worker: jax writes a cached program in place, and another that reads it meanwhile warns of half a file.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    os.environ.setdefault("JPAGED_CACHE_DIR", os.path.expanduser(f"~/.cache/jpaged/tests/{worker}"))
    flags = [os.environ.get("XLA_FLAGS", "")]
    if config.option.markexpr == "not long" and "xla_backend_optimization_level" not in flags[0]:
        flags.append(QUICK_XLA_FLAG)
    if "xla_force_host_platform_device_count" not in flags[0]:
        flags.append(DEVICES_XLA_FLAG)
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
