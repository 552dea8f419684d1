"""Settings every test shares."""

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.choosing import is_in_part, is_long, is_long_file, part_of, thin

QUICK = "not long and not deep"
"""The marker expression of the quick suite."""

# XLA's code generator does little of its optimising: the suite spends its time in compiles, and those of
# tests/models took 43 s of CPU so, instead of 107 s. The long tests run what a server runs, but for those that compare
# programs with each other (`quick_programs`).
QUICK_XLA_OPTIONS: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
if metadata.version("jaxlib").startswith("0.10."):
    # Loops go to LLVM without being lowered by MLIR before: half of what is left. Later jaxlibs have no such option.
    QUICK_XLA_OPTIONS["xla_cpu_use_fusion_emitters"] = False
    # One LLVM module a program, and not up to 32 for as many threads: a third of the compiler's CPU time less.
    QUICK_XLA_OPTIONS["xla_cpu_parallel_codegen_split_count"] = "1"
QUICK_XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK_XLA_OPTIONS.items())

# What runs on a mesh is tested on virtual CPU devices; a test on one device is as quick among eight.
DEVICES_XLA_FLAG = "--xla_force_host_platform_device_count=8"

# Nothing that a busy machine could change decides, and every run tries the same examples.
settings.register_profile(
    "jpaged", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("jpaged")

_CACHE = pytest.StashKey[str]()

# A compiled program takes two dozen memory maps, of which Linux gives a process 65530 (vm.max_map_count): behind them
# XLA's compiler crashes. No file of tests comes near that by itself.
_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 10_000

# New objects between two automatic collections, of which jax releases what no array holds any longer in each.
_MANY_OBJECTS = 10_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what CI chooses with, which has no time for every long test."""
    parser.addoption("--part", metavar="K/N", default="1/1", help="run the K-th of N parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Set what libraries read once, when they are imported; what the caller has set stays."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool warns after a fork
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a download is broken
    starts_workers = bool(getattr(config.option, "numprocesses", None))  # they inherit what is set here
    if "JPAGED_CACHE_DIR" not in os.environ and not starts_workers:
        # Of this run and this worker: no run finds what another left, and no reader half of what is being written.
        config.stash[_CACHE] = os.environ["JPAGED_CACHE_DIR"] = tempfile.mkdtemp(prefix="jpaged-tests-")
    flags = [os.environ.get("XLA_FLAGS", "")]
    if config.option.markexpr == QUICK:
        _hide_torch()
        if "xla_backend_optimization_level" not in flags[0]:
            flags.append(QUICK_XLA_FLAGS)
    if "xla_force_host_platform_device_count" not in flags[0]:
        flags.append(DEVICES_XLA_FLAG)
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without quick tests for the quick suite, unless they are named."""
    if config.option.markexpr != QUICK or not is_long_file(collection_path):
        return None
    return None if any(Path(arg.partition("::")[0]).resolve() == collection_path for arg in config.args) else True


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Do not make the cases of long functions and classes for the quick suite, unless tests are named."""
    config = collector.config
    if config.option.markexpr != QUICK or not is_long(obj) or any("::" in arg for arg in config.args):
        return None
    return []


def _hide_torch() -> None:
    """Let transformers not find torch: it would import it, which takes a second. Tests with torch are long."""
    find_spec = importlib.util.find_spec

    def find_other(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    importlib.util.find_spec = find_other


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without a garbage collector, and keep what they import out of every later collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(_MANY_OBJECTS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that `thinned` leaves out, and keep the part that was asked for."""
    thin(items)
    part, num_parts = part_of(config.getoption("--part"))
    kept = [item for item in items if is_in_part(item.nodeid, part, num_parts)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not is_in_part(item.nodeid, part, num_parts)])
        items[:] = kept


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take away the cache of this run."""
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


@pytest.fixture(scope="module")
def quick_programs() -> Iterator[None]:
    """Serving programs that XLA hardly optimises, for tests that compare programs which are all made alike."""
    from jpaged.device.compilation import compile as compile_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compile_module._COMPILER_OPTIONS, "cpu", QUICK_XLA_OPTIONS)
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_compile_cache_of_another_file() -> None:
    """Every file begins without a compile cache: it is one for the process, and a worker's files come in any order."""
    if (compile_module := sys.modules.get("jpaged.device.compilation.compile")) is not None:
        compile_module.set_up_compile_cache(None)


@pytest.fixture(scope="module", autouse=True)
def _no_programs_of_many_files() -> None:
    """A worker forgets what it has compiled before it has too much."""
    if (jax := sys.modules.get("jax")) is not None and _MAPS.exists() and _num_maps() > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()  # programs are in cycles with what made them


def _num_maps() -> int:
    with _MAPS.open("rb") as maps:
        return sum(1 for _ in maps)
