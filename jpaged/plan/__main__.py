"""Compiler process for one target: `python -m jpaged.plan`, the child of `jpaged.plan.compilation`.

It gets the compiler by its environment and the question on stdin. It writes lines to stdout: `progress TEXT`, and one
of `result` or `error` with a pickle in base64.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys

from jpaged.errors import InvalidArgument, JpagedError
from jpaged.plan.compilation import Question, answer


def main() -> int:
    """Compile the plan of the question on stdin."""
    question = Question(**json.loads(sys.stdin.read()))

    def progress(what: str, done: int, total: int) -> None:
        _write("progress", f"{question.target}: {what}: {done} of {total}")

    try:
        found = answer(question, progress)
    except InvalidArgument as error:
        _write("error", _encoded(("InvalidArgument", error.field, error.problem)))
    except JpagedError as error:
        _write("error", _encoded((type(error).__name__, str(error))))
    else:
        _write("result", _encoded(found))
    return 0


def _encoded(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def _write(kind: str, text: str) -> None:
    sys.stdout.write(f"{kind} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
