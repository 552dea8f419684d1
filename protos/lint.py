"""Lint protos/ by the rules that keep a public gRPC API able to grow.

| rule                 | what it holds                                                                            |
|----------------------|------------------------------------------------------------------------------------------|
| package-version      | the package ends in a version: `jpaged.v1`                                               |
| package-directory    | the file lies in the directory that its package names                                    |
| enum-zero            | the zero value of an enum ends in `_UNSPECIFIED`                                         |
| enum-prefix          | values of `FinishReason` start with `FINISH_REASON_`                                     |
| service-suffix       | a service is named `...Service`                                                          |
| rpc-request/response | rpc `Generate` takes `GenerateRequest`, returns `GenerateResponse`, and no other rpc does |
| optional-default     | a scalar request field whose comment says `Default: x`, x not its zero, is `optional`    |
| comment              | everything has a comment but an rpc's own messages and a value `_UNSPECIFIED`            |
| case                 | names are in protobuf's case: `MessageName`, `field_name`, `VALUE_NAME`                  |

A package that others have published (`PUBLISHED`) has its names and shapes from them: there the last two hold, and no
other.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from protos.generate import PROTOS, proto_files, protoc_arguments

# Field numbers of descriptor.proto: a comment is found by the path of numbers to what it describes.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
ENUM_VALUE, SERVICE_METHOD = 2, 2

PUBLISHED = {"inference"}
"""Packages whose names are not ours to choose."""
OF_PUBLISHED = {"comment", "case"}

PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
DEFAULT = re.compile(r"\bDefault: *(\"[^\"]*\"|[^\s,;]+)")
ZEROS = {"0", "0.0", '""', "false", "empty", "none", "unset"}


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, at a line counted from 1."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


def compile_protos(protos: Path) -> FileDescriptorSet:
    """Return the descriptors, with comments, of every proto below `protos`.

    Raises:
        SystemExit: protoc refused the protos; it has printed why.
    """
    files = proto_files(protos)
    if not files:
        return FileDescriptorSet()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "set"
        arguments = [*protoc_arguments(protos), f"--descriptor_set_out={output}", "--include_source_info", *files]
        if status := protoc.main(arguments):
            raise SystemExit(status)
        return FileDescriptorSet.FromString(output.read_bytes())


def lint(descriptors: FileDescriptorSet) -> list[Violation]:
    """Return every violation, in the order of files and lines."""
    requests = _request_messages(descriptors)
    found = [violation for file in descriptors.file for violation in _FileLint(file, requests).run()]
    taken: dict[str, str] = {}
    published = {file.name for file in descriptors.file if file.package in PUBLISHED}
    for file in descriptors.file:
        for service in file.service:
            for method in service.method:
                other = taken.setdefault(method.input_type, f"{service.name}.{method.name}")
                if other != f"{service.name}.{method.name}":
                    text = f"{service.name}.{method.name} takes {method.input_type[1:]}, which {other} takes too"
                    found.append(Violation(file.name, 1, "rpc-request", text))
    held = [one for one in found if one.file not in published or one.rule in OF_PUBLISHED]
    return sorted(held, key=lambda violation: (violation.file, violation.line))


def _request_messages(descriptors: FileDescriptorSet) -> set[str]:
    """Return the full names (`.jpaged.v1.X`) of the messages that a request holds, at any depth."""
    messages: dict[str, DescriptorProto] = {}

    def collect(prefix: str, nested: Sequence[DescriptorProto]) -> None:
        for message in nested:
            messages[f"{prefix}.{message.name}"] = message
            collect(f"{prefix}.{message.name}", message.nested_type)

    for file in descriptors.file:
        collect(f".{file.package}", file.message_type)
    pending = [method.input_type for file in descriptors.file for service in file.service for method in service.method]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name in messages and name not in reached:
            reached.add(name)
            pending += [field.type_name for field in messages[name].field]
    return reached


class _FileLint:
    """The rules over one file: each method yields what it finds at a path in the descriptor."""

    def __init__(self, file: FileDescriptorProto, requests: set[str]) -> None:
        self.file = file
        self.requests = requests
        methods = [method for service in file.service for method in service.method]
        self.rpc_messages = {f"{method.name}{kind}" for method in methods for kind in ("Request", "Response")}
        self.locations = {tuple(location.path): location for location in file.source_code_info.location}

    def run(self) -> Iterator[Violation]:
        package = self.file.package
        if not re.search(r"\.v[1-9]\d*((alpha|beta)\d*)?$", package):
            yield self.violation((2,), "package-version", f"package {package!r} does not end in a version such as .v1")
        if (directory := PurePosixPath(self.file.name).parent.as_posix()) != package.replace(".", "/"):
            yield self.violation((2,), "package-directory", f"package {package!r} lies in {directory!r}")
        for index, message in enumerate(self.file.message_type):
            yield from self.message((FILE_MESSAGE, index), f".{package}.{message.name}", message)
        for index, enum in enumerate(self.file.enum_type):
            yield from self.enum((FILE_ENUM, index), enum)
        for index, service in enumerate(self.file.service):
            yield from self.service((FILE_SERVICE, index), service)

    def violation(self, path: tuple[int, ...], rule: str, text: str) -> Violation:
        line = self.locations[path].span[0] + 1 if path in self.locations else 1
        return Violation(self.file.name, line, rule, text)

    def comment(self, path: tuple[int, ...]) -> str:
        location = self.locations.get(path)
        return "" if location is None else f"{location.leading_comments} {location.trailing_comments}".strip()

    def named(self, path: tuple[int, ...], name: str, case: re.Pattern[str]) -> Iterator[Violation]:
        needs_none = name.endswith("_UNSPECIFIED") or name in self.rpc_messages
        if not needs_none and not self.comment(path):
            yield self.violation(path, "comment", f"{name} has no comment")
        if not case.fullmatch(name):
            yield self.violation(path, "case", f"{name} is not in the case of its kind")

    def message(self, path: tuple[int, ...], full_name: str, message: DescriptorProto) -> Iterator[Violation]:
        if message.options.map_entry:
            return
        yield from self.named(path, message.name, PASCAL)
        for index, field in enumerate(message.field):
            field_path = (*path, MESSAGE_FIELD, index)
            yield from self.named(field_path, field.name, SNAKE)
            if full_name in self.requests:
                yield from self.optional_default(field_path, message.name, field)
        for index, nested in enumerate(message.nested_type):
            yield from self.message((*path, MESSAGE_NESTED, index), f"{full_name}.{nested.name}", nested)
        for index, enum in enumerate(message.enum_type):
            yield from self.enum((*path, MESSAGE_ENUM, index), enum)
        for index, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # protoc makes `_x` for `optional x`
                yield from self.named((*path, MESSAGE_ONEOF, index), oneof.name, SNAKE)

    def optional_default(self, path: tuple[int, ...], message: str, field: FieldDescriptorProto) -> Iterator[Violation]:
        has_presence = field.HasField("oneof_index") or field.type == FieldDescriptorProto.TYPE_MESSAGE
        if has_presence or field.label == FieldDescriptorProto.LABEL_REPEATED:
            return
        default = DEFAULT.search(self.comment(path))
        if default and not _is_zero(default[1]):
            text = (
                f"{message}.{field.name} has the default {default[1].rstrip('.')}: without `optional` it reads as zero"
            )
            yield self.violation(path, "optional-default", text)

    def enum(self, path: tuple[int, ...], enum: EnumDescriptorProto) -> Iterator[Violation]:
        yield from self.named(path, enum.name, PASCAL)
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        for index, value in enumerate(enum.value):
            value_path = (*path, ENUM_VALUE, index)
            yield from self.named(value_path, value.name, UPPER)
            if not value.name.startswith(prefix):
                yield self.violation(value_path, "enum-prefix", f"{value.name} does not start with {prefix}")
            if value.number == 0 and not value.name.endswith("_UNSPECIFIED"):
                yield self.violation(value_path, "enum-zero", f"{value.name} is zero and not _UNSPECIFIED")

    def service(self, path: tuple[int, ...], service: ServiceDescriptorProto) -> Iterator[Violation]:
        yield from self.named(path, service.name, PASCAL)
        if not service.name.endswith("Service"):
            yield self.violation(path, "service-suffix", f"{service.name} does not end in Service")
        for index, method in enumerate(service.method):
            method_path = (*path, SERVICE_METHOD, index)
            yield from self.named(method_path, method.name, PASCAL)
            for kind, type_name in (("request", method.input_type), ("response", method.output_type)):
                expected = f".{self.file.package}.{method.name}{kind.capitalize()}"
                if type_name != expected:
                    text = f"{method.name} uses {type_name[1:]} where {expected[1:]} belongs"
                    yield self.violation(method_path, f"rpc-{kind}", text)


def _is_zero(default: str) -> bool:
    value = default if default.startswith('"') else default.rstrip(".").lower()
    return value in ZEROS or value.endswith("_unspecified") or re.fullmatch(r"0+(\.0*)?", value) is not None


def main() -> int:
    """Print the violations in protos/; return the exit status."""
    violations = lint(compile_protos(PROTOS))
    for violation in violations:
        print(f"protos/{violation}", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
