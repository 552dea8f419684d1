"""The subcommand `doctor`: checks the installation, and shows the effective settings.

A server requires from this machine: cache, open files, ports, files of options, other processes. Devices, kernels and
the model are checked by a child process with a timeout, because a check may hang or crash:

    python -m jpaged.cli.doctor    reads the options as JSON from stdin, writes a line of JSON after each check

The child downloads nothing: the parent sets HF_HUB_OFFLINE.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jpaged import json_text
from jpaged.cli import packages
from jpaged.cli.options import add_config_flags, config_from, config_values, to_flag
from jpaged.cli.packages import Finding, in_bytes
from jpaged.config import (
    EngineConfig,
    child_environment,
    compile_cache_dir,
    compile_cache_url,
    explain_environment,
    iter_options,
)
from jpaged.config.option import without_credentials
from jpaged.errors import InvalidArgument, JpagedError, describe_error
from jpaged.version import __version__

_COMMAND = (sys.executable, "-m", "jpaged.cli.doctor")
STAGES = ("devices", "kernels", "model")
"""The checks of the child in order; each line is {stage: {...}} or {stage: {"error": text}}."""
_ASKED: Mapping[str, str] = {
    "devices": "listing JAX devices",
    "kernels": "loading the CPU kernels",
    "model": "reading the model's config and tokenizer",
}
_INSTRUCTIONS: Mapping[str, str] = {
    "avx512bf16": "AVX-512 with bfloat16",
    "avx512vnni": "AVX-512 with VNNI",
    "avx512": "AVX-512",
    "avxvnni": "AVX2 with VNNI",
    "avx2": "AVX2",
    "i8mm": "NEON with integer matrix products",
    "dotprod": "NEON with dot products",
    "baseline": "no wide vectors",
}


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Results of the child.

    Attributes:
        found: results by stage, in the order of STAGES.
        end: how it ended before completing all stages; None if it completed.
    """

    found: Mapping[str, Mapping[str, Any]]
    end: str | None


def run_checks(options: Mapping[str, Any], timeout_s: float, command: Sequence[str] = _COMMAND) -> DoctorReport:
    """Run the child and collect its output until it ends or times out."""
    environment = child_environment({"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as child:
        try:
            said, problems = child.communicate(json_text.dumps(dict(options)), timeout=timeout_s)
            end = None
        except subprocess.TimeoutExpired:
            child.kill()
            said, problems = child.communicate()
            end = f"no answer within {timeout_s:g} s"
    found: dict[str, Mapping[str, Any]] = {}
    for line in said.splitlines():
        if line.startswith("{"):  # libraries may print, too
            found.update(json.loads(line))
    is_whole = len(found) == len(STAGES) or any("error" in one for one in found.values())
    if end is None and not is_whole:
        last = problems.strip().splitlines()[-1:] or ["no output"]
        end = f"the process exited with code {child.returncode}: {last[0]}"
    return DoctorReport(found, None if is_whole else end)


def device_findings(answer: DoctorReport) -> Iterator[Finding]:
    """Yield the findings of the child's results."""
    tell = {"devices": _devices, "kernels": _kernels, "model": _model}
    for stage in STAGES:
        if stage in answer.found:
            yield from tell[stage](answer.found[stage])
        elif answer.end is not None:
            note = f"while {_ASKED[stage]}: {answer.end}"
            remedy = "JAX_PLATFORMS=cpu ignores accelerators; --timeout waits longer"
            yield Finding(stage, stage, "stop", "unknown", note, remedy)
            return


def _devices(found: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        yield Finding("devices", "devices", "stop", "none", found["error"], "JAX_PLATFORMS=cpu ignores accelerators")
        return
    known = f", {found['hardware']} in the hardware table" if found["hardware"] else ""
    yield Finding("devices", found["platform"], "ok", f"{found['num_devices']} x {found['device_kind']}{known}")
    memory = f"{in_bytes(found['available_bytes'])} free of {in_bytes(found['physical_bytes'])}"
    yield Finding("devices", "host memory", "ok", memory)


def _kernels(found: Mapping[str, Any]) -> Iterator[Finding]:
    name, build = "CPU kernels", "python -m jpaged.kernels.cpu.build"
    if "error" in found or "missing" in found:
        reason = found.get("missing", found.get("error"))
        note = f"{reason}; CPUs run XLA's operations instead, which is slower"
        yield Finding("kernels", name, "off", "not found", note, build)
        return
    yield Finding("kernels", name, "ok", found["library"])
    for what in ("attention", "products"):
        vectors = found[what]
        yield Finding("kernels", what, "ok", f"{vectors} ({_INSTRUCTIONS.get(vectors, vectors)})")


def _model(found: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        if found["kind"] == "NotFound" and "the hub" in found["error"]:
            note = "not on this machine: `jpaged serve` would download it (not tried here)"
            yield Finding("model", "model", "warn", "not found", note)
        else:
            yield Finding("model", "model", "stop", "cannot be served", found["error"])
        return
    yield Finding("model", "architecture", "ok", found["architecture"])
    yield Finding("model", "dtype", "ok", str(found["dtype"]), found["dtype_reason"])
    for name in ("attention_backend", "linear_backend", "activation_dtype", "kv_cache_dtype", "max_model_len"):
        yield Finding("model", name, "ok", str(found[name]))
    for line in found["passed_over"]:
        yield Finding("model", "passed over", "warn", line)
    steps = f"{found['max_num_seqs']} rows, {found['max_num_batched_tokens']} tokens, blocks of {found['block_size']}"
    yield Finding("model", "a step", "ok", steps)
    yield _memory(found["weight_bytes"], found["memory_bytes"], found["memory_utilization"])


def _memory(weight_bytes: int, memory_bytes: int | None, share: float) -> Finding:
    if memory_bytes is None:
        return Finding(
            "model", "memory", "ok", f"weights {in_bytes(weight_bytes)}; the device does not report its memory"
        )
    value = f"weights {in_bytes(weight_bytes)}; jpaged may use {share:g} of {in_bytes(memory_bytes)}"
    if weight_bytes < share * memory_bytes:
        return Finding("model", "memory", "ok", value)
    note = "the weights alone do not fit"
    remedy = "a smaller --dtype or --quantization, a larger --tensor-parallel-size, or another machine: `jpaged plan`"
    return Finding("model", "memory", "stop", value, note, remedy)


_MAX_COUNTED = 20_000
"""Maximum counted files of a cache: this many take 0.2 s."""
_LEAST_FREE_BYTES = 1 << 30


def cache(folder: Path | None) -> Iterator[Finding]:
    """Yield the state of the cache of compiled programs: its size, and if it is writable."""
    name, remedy = "compiled programs", "set JPAGED_CACHE_DIR to a writable folder"
    if folder is None:
        note = "JPAGED_CACHE_DIR is empty: every start compiles everything again"
        yield Finding("machine", name, "off", "disabled", note, remedy)
        return
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        note = f"{there} is not writable: every start compiles everything again"
        yield Finding("machine", name, "warn", str(folder), note, remedy)
        return
    sizes = [_get_size(path) for path in islice(folder.rglob("*"), _MAX_COUNTED)] if folder.is_dir() else []
    free = shutil.disk_usage(there).free
    more = " at least" if len(sizes) == _MAX_COUNTED else ""
    value = f"{folder}: {in_bytes(sum(sizes))}{more} in use, {in_bytes(free)} free"
    if free < _LEAST_FREE_BYTES:
        yield Finding("machine", name, "warn", value, "the disk is nearly full: programs may not be cached", remedy)
    else:
        yield Finding("machine", name, "ok", value)


def shared_cache() -> Iterator[Finding]:
    """Yield the object storage of compiled programs, if one is set; nothing is read there."""
    import fsspec

    name = "shared programs"
    try:
        url = compile_cache_url()
    except InvalidArgument as error:
        yield Finding("machine", name, "stop", error.field, error.problem)
        return
    if url is None:
        return
    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        yield Finding("machine", name, "stop", without_credentials(url), str(error), "install fsspec's package for it")
    else:
        yield Finding("machine", name, "ok", without_credentials(url))


def _get_size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # another process has removed it
        return 0


def limits(max_connections: int) -> Iterator[Finding]:
    """Yield the processors and the system's limits."""
    yield Finding("machine", "processors", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)}, at most {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft // 2 < max_connections:
        note = f"connections are limited to half of them, below max_connections ({max_connections})"
        yield Finding("machine", "open files", "warn", value, note, f"ulimit -n {2 * max_connections}")
    else:
        yield Finding("machine", "open files", "ok", value)
    for name, number in (
        ("address space", resource.RLIMIT_AS),
        ("locked memory", resource.RLIMIT_MEMLOCK),
        ("processes", resource.RLIMIT_NPROC),
        ("stack", resource.RLIMIT_STACK),
    ):
        soft, _ = resource.getrlimit(number)
        is_tight = number == resource.RLIMIT_AS and soft != resource.RLIM_INFINITY
        note = "XLA reserves more address space than it uses: loading may fail" if is_tight else ""
        remedy = "ulimit -v unlimited" if is_tight else ""
        shown = _limit(soft) if number == resource.RLIMIT_NPROC else _limit_bytes(soft)
        yield Finding("machine", name, "warn" if is_tight else "ok", shown, note, remedy)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _limit_bytes(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else in_bytes(value)


def ports(config: EngineConfig) -> Iterator[Finding]:
    """Yield if the ports of a server with these options are free."""
    values = {name: getattr(getattr(config, section), name) for name, section, _ in iter_options()}
    for name, _, spec in iter_options():
        host = values.get(f"{name.removesuffix('port')}host", config.server.host)
        number = values[name]
        if not name.endswith("port") or spec.metadata["high"] != 65535 or number is None:
            continue
        if number == 0:
            yield Finding("machine", name, "ok", "any free port")
        elif problem := _why_not_free(host, number):
            yield Finding("machine", name, "stop", f"{host}:{number}", problem, f"{to_flag(name)} 0 picks a free one")
        else:
            yield Finding("machine", name, "ok", f"{host}:{number} is free")


def _why_not_free(host: str, port: int) -> str:
    """Return the system's error for a socket at an address; empty if it can be opened."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def files(config: EngineConfig) -> Iterator[Finding]:
    """Yield if the files and folders of the options exist and can be read."""
    for name, section, spec in iter_options():
        kind, value = spec.metadata["path"], getattr(getattr(config, section), name)
        if not kind or value is None:
            continue
        path = Path(value)
        if problem := _why_not_usable(path, kind):
            yield Finding("machine", name, "stop", str(path), problem, f"give another {to_flag(name)}")
        else:
            yield Finding("machine", name, "ok", str(path))


def _why_not_usable(path: Path, kind: str) -> str:
    """Return why a path cannot be used for an option of this kind; empty if it can."""
    if kind == "new file" and path.exists():
        return "" if path.is_file() and os.access(path, os.W_OK) else "not writable"
    if kind.startswith("new"):
        there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        return "" if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"
    if not (path.is_file() if kind == "file" else path.is_dir()):
        return f"there is no such {kind}"
    return "" if os.access(path, os.R_OK) else "not readable"


def processes(config: EngineConfig) -> Iterator[Finding]:
    """Yield if this would be one of several processes."""
    try:
        found = config.multihost()
    except InvalidArgument as error:
        yield Finding("machine", "multiple processes", "stop", "invalid", str(error), "--num-processes 1")
        return
    if found is not None:
        value = f"{found.process_id} of {found.num_processes}, process 0 at {found.coordinator} ({found.source})"
        yield Finding("machine", "multiple processes", "ok", value)


def environment_findings() -> Iterator[Finding]:
    """Yield the variables that jpaged reads, and set variables of libraries."""
    for name, value, text in explain_environment():
        if value is None:
            yield Finding("environment", name, "ok", "not set", text)
        else:
            yield Finding("environment", name, "ok", value or "(empty)", text)


def machine_findings(config: EngineConfig) -> Iterator[Finding]:
    """Yield all findings about this machine."""
    yield from limits(config.server.max_connections)
    try:
        yield from cache(compile_cache_dir())
    except InvalidArgument as error:
        yield Finding("machine", "compiled programs", "stop", error.field, error.problem)
    yield from shared_cache()
    yield from ports(config)
    yield from files(config)
    yield from processes(config)


DESCRIPTION = """\
Check the installation: list missing components with the features they disable, and show how a model would be served.

    jpaged doctor
    jpaged doctor MODEL --tensor-parallel-size 2 --port 8000
    jpaged doctor --json

The command accepts the options of `jpaged serve` and starts no server. It reads only the model's config and tokenizer,
and downloads nothing. Exit code 0: no check found a problem that prevents such a server; 1: at least one did.
"""
_STYLES = {"ok": "green", "off": "dim", "warn": "yellow", "stop": "bold red"}
_NAME_COLUMNS, _INDENT = 24, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the output format, the timeout, and every option of a server."""
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="timeout for the device check in seconds (default: 60)"
    )
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them prevents a server from starting."""
    if not (arguments.timeout > 0 and math.isfinite(arguments.timeout)):
        raise InvalidArgument("--timeout", f"{arguments.timeout} is not a finite number above 0")
    config = config_from(arguments)
    found = list(_look(config, config_values(arguments), arguments.timeout))
    stops = [one for one in found if one.state == "stop"]
    if arguments.json:
        listed = [asdict(one) for one in found]
        print(json_text.dumps({"version": __version__, "ok": not stops, "findings": listed}, indent=2))
    else:
        _show(found, stops, config.model.model)
    return 1 if stops else 0


def _look(config: EngineConfig, options: dict[str, object], timeout_s: float) -> Iterator[Finding]:
    yield from packages.python()
    yield from packages.requirements()
    yield from packages.extras()
    yield from packages.undriven()
    yield from device_findings(run_checks(options, timeout_s))
    yield from machine_findings(config)
    yield from environment_findings()


def _show(found: Sequence[Finding], stops: Sequence[Finding], model: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for group in dict.fromkeys(one.group for one in found):
        console.print(Text(f"{group}", style="bold"))
        for one in found:
            if one.group == group:
                _show_one(console, one)
    if stops:
        names = ", ".join(one.name for one in stops)
        console.print(
            Text(f"Problems that prevent `jpaged serve {model}` ({len(stops)}): {names}", style=_STYLES["stop"])
        )
    else:
        console.print(f"No problem found that prevents `jpaged serve {model}`.", markup=False)


def _show_one(console: Console, one: Finding) -> None:
    line = Text("  ")
    line.append(f"{one.state:<5} ", _STYLES[one.state])
    line.append(f"{one.name:<{_NAME_COLUMNS}} {one.value}")
    console.print(line)
    width = max(40, console.width - _INDENT)
    for text in filter(None, (one.note, one.remedy and f"-> {one.remedy}")):
        console.print(Text(textwrap.indent(textwrap.fill(text, width), " " * _INDENT), "dim"))


def run_child() -> int:
    """Run the checks of the child in order; stop after the first failure."""
    options: dict[str, Any] = json.loads(sys.stdin.read())
    find: dict[str, Callable[[], dict[str, Any]]] = {
        "devices": _find_devices,
        "kernels": _find_kernels,
        "model": lambda: _find_model(options),
    }
    for stage in STAGES:
        try:
            found = find[stage]()
        except (JpagedError, OSError, RuntimeError) as error:
            is_known = isinstance(error, JpagedError | OSError)
            text = describe_error(error) if is_known else str(error).partition("\n")[0]
            print(json_text.dumps({stage: {"error": text, "kind": type(error).__name__}}), flush=True)
            return 1
        print(json_text.dumps({stage: found}), flush=True)
    return 0


def _find_devices() -> dict[str, Any]:
    from jpaged.device.device_info import look

    return asdict(look())


def _find_kernels() -> dict[str, Any]:
    from jpaged.kernels.cpu.build import LIBRARY
    from jpaged.kernels.matmul.multiply import kernel as product
    from jpaged.kernels.paged_attention.cpu import kernel as attention

    of_attention, of_products = attention(), product()
    if isinstance(of_attention, str) or isinstance(of_products, str):
        missing = of_attention if isinstance(of_attention, str) else of_products
        return {"missing": missing}
    return {"library": str(LIBRARY), "attention": of_attention.vectors, "products": of_products.core}


def _find_model(options: dict[str, Any]) -> dict[str, Any]:
    from jpaged import build as build_module

    return asdict(build_module.preview(EngineConfig.load(options)))


if __name__ == "__main__":
    sys.exit(run_child())
