"""Generate jpaged/_proto from protos/.

protos/jpaged/v1/x.proto becomes jpaged/_proto/v1/x_pb2.py, x_pb2.pyi and, where it has a service, x_pb2_grpc.py.
protos/jpaged/open_inference/ has messages under names that others have published. A process may have them from the
others, too (`tritonclient`), and protobuf takes a name once in a pool of descriptors: ours are in a pool of their own.
The output is a function of the protos and of the pinned grpcio-tools alone; `--check` fails where the files on disk
differ from it.
"""

import argparse
import importlib.resources
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import google.rpc
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUTPUT = ROOT / "jpaged" / "_proto"
PACKAGE_DOCSTRING = '"""Generated from protos/ by `make proto`; never edited."""\n'

# protoc writes `from jpaged.v1 import x_pb2`: a path in the proto tree, not in ours.
_OWN_IMPORT = re.compile(r"^(\s*)from jpaged\.(v\w+|open_inference)( import )", re.MULTILINE)

# And the module that messages say they are of, by which pickle finds their class.
_OWN_MODULE = re.compile(r"^(_builder\.Build\w+\(DESCRIPTOR, ')jpaged\.(v\w+|open_inference)", re.MULTILINE)

# Protos whose names others have published, and what gives those a pool of their own.
_PUBLISHED = "open_inference"
_SHARED_POOL, _OWN_POOL = "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"


def protoc_arguments(protos: Path) -> list[str]:
    """Return the include paths: our protos, protobuf's well-known types and googleapis' common types."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    common = Path(next(iter(google.rpc.__path__))).parent.parent
    return ["protoc", f"-I{protos}", f"-I{well_known}", f"-I{common}"]


def proto_files(protos: Path) -> list[str]:
    """Return every proto's path below `protos`, sorted."""
    return sorted(path.relative_to(protos).as_posix() for path in protos.rglob("*.proto"))


def generate(protos: Path) -> dict[str, str]:
    """Return what jpaged/_proto holds: relative path -> text.

    Raises:
        SystemExit: protoc refused the protos; it has printed why.
    """
    files = proto_files(protos)
    texts = {"__init__.py": PACKAGE_DOCSTRING}
    if not files:
        return texts
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if status := protoc.main([*protoc_arguments(protos), *outputs, *files]):
            raise SystemExit(status)
        made = Path(scratch) / "jpaged"
        for path in sorted(made.rglob("*.py*")):
            text = path.read_text()
            if path.name.endswith("_pb2_grpc.py") and "class " not in text:
                continue  # a file of messages alone
            name = path.relative_to(made)
            text = _OWN_IMPORT.sub(r"\1from jpaged._proto.\2\3", text)
            if name.parts[0] == _PUBLISHED:
                text = text.replace(_SHARED_POOL, _OWN_POOL)
            texts[name.as_posix()] = _OWN_MODULE.sub(r"\1jpaged._proto.\2", text)
            texts[(name.parent / "__init__.py").as_posix()] = PACKAGE_DOCSTRING
    return texts


def stored(output: Path) -> dict[str, str]:
    """Return what `output` holds now: relative path -> text."""
    paths = (path for path in output.rglob("*.py*") if path.suffix in {".py", ".pyi"})
    return {path.relative_to(output).as_posix(): path.read_text() for path in paths}


def differences(output: Path, wanted: dict[str, str]) -> list[str]:
    """Return one line for each file of `output` that is missing, stale or not generated."""
    found = stored(output)
    lines = [
        f"{name}: {'differs' if name in found else 'is missing'}" for name in wanted if found.get(name) != wanted[name]
    ]
    return sorted(lines + [f"{name}: nothing generates it" for name in found.keys() - wanted.keys()])


def write(output: Path, wanted: dict[str, str]) -> None:
    """Make `output` hold `wanted` and nothing else; files already right keep their times."""
    found = stored(output)
    for name in found.keys() - wanted.keys():
        (output / name).unlink()
    for name, text in wanted.items():
        if found.get(name) != text:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text)


def main(argv: Sequence[str]) -> int:
    """Write the generated files, or with `--check` compare them; return the exit status."""
    parser = argparse.ArgumentParser(description="Generate jpaged/_proto from protos/.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the files on disk differ")
    wanted = generate(PROTOS)
    if not parser.parse_args(argv).check:
        write(OUTPUT, wanted)
        return 0
    lines = differences(OUTPUT, wanted)
    for line in lines:
        print(f"jpaged/_proto/{line}", file=sys.stderr)
    if lines:
        print("run `make proto` and commit the result", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
