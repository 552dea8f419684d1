"""`python -m jpaged` is `jpaged`, and an interrupt is quiet also while it is being imported.

A required package that is missing, too old or broken ends a command with a sentence. `--version` and the check of
packages of `doctor` import nothing except Python's own library.
"""

import io
import os
import sys

_STDERR = 2


def run() -> int:
    """The exit code of the command line."""
    words = sys.argv[1:]
    try:
        _open_streams()
        from jpaged.cli.doctor import packages

        if words == ["--version"]:
            sys.stdout.write(f"jpaged {packages.VERSION}\n")
            return 0
        if words[:1] == ["doctor"] and (found := packages.unmet()):
            packages.show(found, as_json="--json" in words)
            return 1
        from jpaged.cli.main import main
    except KeyboardInterrupt:
        return 130
    except (ImportError, RuntimeError) as error:  # RuntimeError: grpc's check of the version of generated code
        return _refuse(words, error)
    except Exception as error:
        if not type(error).__module__.startswith("google.protobuf"):
            raise
        return _refuse(words, error)
    return main()


def _refuse(words: list[str], error: Exception) -> int:
    """Report a package that cannot be imported; return the exit code."""
    from jpaged.cli.doctor import packages

    if words[:1] == ["doctor"]:
        packages.show([packages.broken(error)], as_json="--json" in words)
    else:
        line = packages.broken(error)
        sys.stderr.write(f"jpaged: {line.note} (`jpaged doctor` checks what is required)\n")
    return 1


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
