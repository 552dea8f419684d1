"""`python -m jpaged`, the same as `jpaged`; exits quietly on an interrupt, even during imports.

A required package that is missing, too old or broken ends a command with one sentence. `--version` and `doctor`'s check
of packages import only Python's standard library.
"""

import io
import os
import sys

_STDERR = 2


def run() -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:]
    try:
        _open_streams()
        if words == ["--version"]:
            from jpaged.version import __version__

            sys.stdout.write(f"jpaged {__version__}\n")
            return 0
        if words[:1] == ["doctor"]:
            from jpaged.cli import packages

            if found := packages.unmet():
                packages.show(found, as_json="--json" in words)
                return 1
        from jpaged.cli.main import main
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from jpaged.cli import packages

        if not packages.is_broken(error):
            raise
        return packages.refuse(words, error)
    return main()


def _open_streams() -> None:
    """Open closed standard streams on /dev/null: otherwise the next file takes their numbers, and Python has None."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # otherwise text that the locale cannot encode would end the command
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(run())
