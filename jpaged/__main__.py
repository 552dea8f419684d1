"""`python -m jpaged` is `jpaged`, and an interrupt is quiet also while it is being imported."""

import io
import os
import sys

_STDERR = 2


def run() -> int:
    """The exit code of the command line."""
    try:
        _open_streams()
        from jpaged.config import silence_grpc_core

        silence_grpc_core()  # before gRPC is imported
        from jpaged.cli.main import main
    except KeyboardInterrupt:
        return 130
    return main()


def _open_streams() -> None:
    """Standard streams that came closed lead nowhere: the next file would take their numbers, and Python has None."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a text ends a command where the locale cannot write it
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(run())
