"""Public names of the previous release still work, with a warning."""

import importlib

import pytest

NAMES = [
    ("jpaged.types", "Continued", "ResumedSequence"),
    ("jpaged.types", "Generated", "PriorOutput"),
    ("jpaged.types", "MAX_TOP_TOLD", "MAX_TOP_LOGPROBS"),
    ("jpaged.structured", "Kind", "ConstraintKind"),
    ("jpaged.client", "Resuming", "ResumePolicy"),
    ("jpaged.chat", "ChatWords", "ChatKwargs"),
    ("jpaged.service.kv_transfer", "Travelling", "PrefixTransferService"),
]


@pytest.mark.parametrize(("module", "former", "name"), NAMES)
def test_a_former_name_is_the_new_one_with_a_warning(module, former, name):
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(home, former) is getattr(home, name)


@pytest.mark.parametrize("module", sorted({module for module, _, _ in NAMES}))
def test_names_that_never_were_are_errors(module):
    with pytest.raises(AttributeError, match="never_was"):
        importlib.import_module(module).never_was  # noqa: B018
