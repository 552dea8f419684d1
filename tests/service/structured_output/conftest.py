"""One vocabulary and one compiler for all files here: the packaged model's."""

import pytest

from jpaged.service.structured_output.compiler import GrammarCompiler
from jpaged.service.structured_output.vocabulary import Vocabulary
from tests.service.structured_output.texts import packaged_vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return packaged_vocabulary()


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()
