"""`import jpaged` costs nothing, and every public name can be had from it."""

import subprocess
import sys

import pytest

import jpaged
from tests.arch.test_architecture import ROOT


def test_every_public_name_is_there():
    assert len(set(jpaged.__all__)) == len(jpaged.__all__)
    for name in jpaged.__all__:
        assert getattr(jpaged, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Nothing'"):
        _ = jpaged.Nothing


def test_importing_jpaged_imports_neither_jax_nor_grpc():
    program = "import jpaged, sys; print(sorted({'jax', 'flax', 'grpc', 'numpy', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
