"""Compiles the CPU kernels while jpaged is installed; what else there is to say stands in pyproject.toml.

Without a C++ compiler the install goes on without them, and `--attention-backend cpu` says so. CXX names one.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = "jpaged.kernels.cpu"


class BuildLibrary(build_ext):
    """Builds a plain shared library, named without Python's ABI, by the package's own function."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        path = Path(__file__).parent.joinpath(*PACKAGE.split("."), "build.py")
        spec = importlib.util.spec_from_file_location("build", path)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.build(library, build.find_compiler(os.environ.get("CXX")), build.find_headers())
        except build.BuildError as error:
            raise CompileError(f"the CPU kernels were not built: {error}") from None


class TagAnyPython(bdist_wheel):
    """The library is bound to the platform, and to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"{PACKAGE}.libjpaged_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagAnyPython},
)
