"""Files of a tokenizer that are larger than any real one are refused before a library reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jpaged.errors import InvalidArgument
from jpaged.service.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/a.jinja",
    ],
)
def test_a_file_over_its_limit_is_named_with_both_numbers(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 3 << 30)
    with pytest.raises(InvalidArgument, match=rf"model: .*{name} has 3221225472 bytes; the limit for this file is \d+"):
        load_tokenizer(tmp_path, vocab_size=8)
