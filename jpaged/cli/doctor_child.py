"""A process for checks that may hang or crash: it writes a line of JSON after each check.

    python -m jpaged.cli.doctor_child    reads the options as JSON from stdin

Nothing is downloaded: the parent sets HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jpaged import json_text
from jpaged.config import EngineConfig
from jpaged.errors import JpagedError, describe_error

STAGES = ("devices", "kernels", "model")
"""The checks in order; each line is {stage: {...}} or {stage: {"error": text}}."""


def main() -> int:
    """Run the checks in order; stop after the first failure."""
    options: dict[str, Any] = json.loads(sys.stdin.read())
    find: dict[str, Callable[[], dict[str, Any]]] = {
        "devices": _devices,
        "kernels": _kernels,
        "model": lambda: _model(options),
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


def _devices() -> dict[str, Any]:
    from jpaged.device.device_info import look

    return asdict(look())


def _kernels() -> dict[str, Any]:
    from jpaged.kernels.cpu.build import LIBRARY
    from jpaged.kernels.matmul.multiply import kernel as product
    from jpaged.kernels.paged_attention.cpu.attention import kernel as attention

    of_attention, of_products = attention(), product()
    if isinstance(of_attention, str) or isinstance(of_products, str):
        missing = of_attention if isinstance(of_attention, str) else of_products
        return {"missing": missing}
    return {"library": str(LIBRARY), "attention": of_attention.vectors, "products": of_products.core}


def _model(options: dict[str, Any]) -> dict[str, Any]:
    from jpaged import build as build_module

    return asdict(build_module.preview(EngineConfig.load(options)))


if __name__ == "__main__":
    sys.exit(main())
