"""Command line of the harness with `--model jpaged`: `python -m jpaged.evaluation --model jpaged --tasks ...`.

For releases of the harness up to 0.4.13; later ones discover the model, and `lm_eval` is the command.
"""

from __future__ import annotations

import importlib
import sys

from jpaged.config import shows_traces
from jpaged.errors import InvalidArgument, JpagedError, describe_error

_INSTALL = "lm_eval is not installed: pip install 'jpaged[lm-eval]'"


def main() -> int:
    """Register the model and run the harness's command line; return the exit code."""
    try:
        harness = importlib.import_module("lm_eval.__main__")
        importlib.import_module("jpaged.evaluation.harness")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        sys.stderr.write(f"jpaged.evaluation: {_INSTALL}\n")
        return 1
    try:
        harness.cli_evaluate()
    except JpagedError as error:
        if shows_traces():
            raise
        is_input = isinstance(error, InvalidArgument)
        sys.stderr.write(f"jpaged.evaluation: {'error: ' if is_input else ''}{describe_error(error)}\n")
        return 2 if is_input else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
