"""`python -m tests.cli.fake_jpaged ...` is `jpaged ...` with a fake model: whole processes are tested without jax.

The model named `broken` cannot be loaded, `unreadable` not be read, and `strange` meets a bug; one named `dies` fails
at its fifth step.
"""

import errno
import sys

from jpaged import build as build_module
from jpaged.cli.main import main
from jpaged.config import EngineConfig
from jpaged.engine.executor import Progress
from jpaged.errors import InvalidArgument
from jpaged.service.loaded_model import LoadedModel
from jpaged.testing import FakeExecutor, Faults
from tests.server.harness import make_serving


def build(options: EngineConfig, progress: Progress, **_: object) -> LoadedModel:
    """In the place of `assemble.build`."""
    progress("weights", 1, 2)
    progress("weights", 2, 2)
    if options.model.model == "broken":
        raise InvalidArgument("model", "broken is not a folder")
    if options.model.model == "unreadable":
        raise PermissionError(errno.EACCES, "Permission denied", "/models/unreadable")
    if options.model.model == "strange":
        raise TypeError("unsupported operand")
    faults = Faults(fail_at_step=5 if options.model.model == "dies" else None)
    executor = FakeExecutor(num_blocks=256, max_model_len=512, faults=faults)
    progress("programs", 1, 1)
    return make_serving(executor, options)


if __name__ == "__main__":
    vars(build_module)["build"] = build
    sys.exit(main())
