"""Prints which libtpu belongs to the jax that is installed, as jax's own metadata pins it: `libtpu==0.0.42.*`."""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement


def libtpu_requirement() -> str:
    """The pin as pip takes it, without its extra.

    Raises:
        LookupError: this jax names no libtpu.
    """
    for line in requires("jax") or ():
        requirement = Requirement(line)
        if requirement.name == "libtpu":
            return f"{requirement.name}{requirement.specifier}"
    raise LookupError(f"jax {version('jax')} names no libtpu in its metadata")


if __name__ == "__main__":
    print(libtpu_requirement())
