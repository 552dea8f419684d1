"""Files as torch.save writes them, without torch: right ones, and hostile ones."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import numpy as np

WIDTH = 4
VALUES = np.arange(12, dtype=np.float32).reshape(3, WIDTH)


class Named:
    """A name of torch, as a pickle refers to it."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """A call that a pickle asks for."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class TorchPickler(pickle._Pickler):  # the one in Python: its methods may be replaced
    """Writes names that cannot be imported here, and storages, as torch does."""

    def persistent_id(self, one: Any) -> Any:
        return one[1:] if isinstance(one, tuple) and one[:1] == ("reference",) else None

    def save(self, one: Any, save_persistent_id: bool = True) -> None:
        if isinstance(one, Named):
            self.write(pickle.GLOBAL + f"{one.module}\n{one.name}\n".encode())  # type: ignore[attr-defined]
        elif isinstance(one, Call):
            self.save(one.function)
            self.save(one.arguments)
            self.write(pickle.REDUCE)  # type: ignore[attr-defined]
        else:
            super().save(one, save_persistent_id)  # type: ignore[misc]


def storage(kind: str = "FloatStorage", key: str = "0", size: int = 12) -> tuple[Any, ...]:
    return ("reference", "storage", Named("torch", kind), key, "cpu", size)


def tensor(of: Any, shape: Any = (3, 4), strides: Any = (4, 1), offset: Any = 0) -> Call:
    rebuild, hooks = Named("torch._utils", "_rebuild_tensor_v2"), Call(Named("collections", "OrderedDict"))
    return Call(rebuild, of, offset, shape, strides, False, hooks)


def torch_file(described: Any, content: bytes = VALUES.tobytes(), compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file as torch.save writes it, or one that only looks like that."""
    pickled, written = io.BytesIO(), io.BytesIO()
    TorchPickler(pickled, 2).dump(described)
    with zipfile.ZipFile(written, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", content)
    return written.getvalue()
