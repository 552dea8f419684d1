"""The files of a model's tokenizer in a zip, from which a gateway builds the same tokenizer."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import Unsupported
from jpaged.service.tokenizer import HuggingFaceTokenizer

CHUNK_BYTES = 64 << 10
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "config.json", "generation_config.json"),
)
_PATTERNS = ("*.model", "*.tiktoken", "*.jinja")
_SAME_TIME = (1980, 1, 1, 0, 0, 0)
"""Fixed time stamp, so that the same files make the same zip."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A zip.

    Attributes:
        sha256: digest of the content, in hexadecimal.
    """

    content: bytes
    sha256: str

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yield the messages that carry it; the last has the digest."""
        last = max(0, len(self.content) - 1) // CHUNK_BYTES
        for number in range(last + 1):
            begin = number * CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(
                data=self.content[begin : begin + CHUNK_BYTES], sha256=self.sha256 if number == last else ""
            )


def bundle_of(tokenizer: Tokenizer) -> Bundle:
    """Put the files of a tokenizer's folder into a zip.

    Raises:
        Unsupported: it has no folder.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.folder.is_dir():
        raise Unsupported("GetTokenizer: this model's tokenizer has no files to send")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in _files(tokenizer.folder):
            entry = zipfile.ZipInfo(path.name, _SAME_TIME)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return Bundle(content.getvalue(), hashlib.sha256(content.getvalue()).hexdigest())


def _files(folder: Path) -> list[Path]:
    found = {folder / name for name in _NAMES}
    for pattern in _PATTERNS:
        found.update(folder.glob(pattern))
    return sorted(path for path in found if path.is_file())
