"""`python -m jpaged` is `jpaged`, and an interrupt is quiet also while it is being imported."""

import sys


def run() -> int:
    """The exit code of the command line."""
    try:
        from jpaged.cli.main import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
