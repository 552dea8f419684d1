"""Pages on the protos, from their comments: services with their calls, messages with their fields, enums."""

import html
import re
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from protos.lint import (
    ENUM_VALUE,
    FILE_ENUM,
    FILE_MESSAGE,
    FILE_SERVICE,
    MESSAGE_ENUM,
    MESSAGE_FIELD,
    MESSAGE_NESTED,
    MESSAGE_ONEOF,
    SERVICE_METHOD,
)

FILE_SYNTAX = 12
_SCALAR = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}  # TYPE_UINT32 -> uint32
_Path = tuple[int, ...]


def reference(descriptors: FileDescriptorSet) -> dict[str, str]:
    """Return a page for each proto, by the proto's path; types link to where they are told of."""
    pages = {file.name: _Page(file, _places(descriptors)) for file in descriptors.file}
    return {name: "\n".join(page.lines()) + "\n" for name, page in pages.items()}


def page_of(proto: str) -> str:
    """jpaged/v1/control.proto -> jpaged.v1.control.md."""
    return proto.removesuffix(".proto").replace("/", ".") + ".md"


def _places(descriptors: FileDescriptorSet) -> dict[str, str]:
    """Where each type is told of: full name -> page#anchor."""
    places = {}

    def note(file: FileDescriptorProto, prefix: str, nested: Sequence[DescriptorProto | EnumDescriptorProto]) -> None:
        for one in nested:
            full = f"{prefix}.{one.name}"
            places[full] = f"{page_of(file.name)}#{_anchor(full, file)}"
            if isinstance(one, DescriptorProto):
                note(file, full, one.nested_type)
                note(file, full, one.enum_type)

    for file in descriptors.file:
        note(file, f".{file.package}", file.message_type)
        note(file, f".{file.package}", file.enum_type)
    return places


def _anchor(full: str, file: FileDescriptorProto) -> str:
    return full.removeprefix(f".{file.package}.").replace(".", "-").lower()


class _Page:
    """One proto as Markdown."""

    def __init__(self, file: FileDescriptorProto, places: dict[str, str]) -> None:
        self.file, self.places = file, places
        self.locations = {tuple(one.path): one for one in file.source_code_info.location}

    def lines(self) -> Iterator[str]:
        yield f"# {self.file.package}: {self.file.name.rpartition('/')[2]}"
        yield ""
        yield from self.comment((FILE_SYNTAX,))
        for index, service in enumerate(self.file.service):
            yield from self.service((FILE_SERVICE, index), service)
        for index, message in enumerate(self.file.message_type):
            yield from self.message((FILE_MESSAGE, index), f".{self.file.package}.{message.name}", message)
        for index, enum in enumerate(self.file.enum_type):
            yield from self.enum((FILE_ENUM, index), f".{self.file.package}.{enum.name}", enum)

    def comment(self, path: _Path, indent: str = "") -> Iterator[str]:
        """The comment at a path; lines that are indented in it are kept as they stand."""
        location = self.locations.get(path)
        if location is None:
            return
        texts = [*location.leading_detached_comments, location.leading_comments, location.trailing_comments]
        lines = [line.removeprefix(" ").rstrip() for text in texts if text.strip() for line in f"{text}\n".split("\n")]
        is_kept = False
        for line in lines:
            if line.startswith("  ") != is_kept and (line or not is_kept):
                is_kept = not is_kept
                yield f"{indent}```{'text' if is_kept else ''}"
                yield from [] if is_kept else [""]
            yield f"{indent}{line if is_kept else _escaped(line)}".rstrip()
        if is_kept:
            yield f"{indent}```"
        yield ""

    def heading(self, level: int, full: str) -> str:
        return f"{'#' * level} {full.removeprefix(f'.{self.file.package}.')} {{#{_anchor(full, self.file)}}}"

    def service(self, path: _Path, service: ServiceDescriptorProto) -> Iterator[str]:
        yield self.heading(2, f".{self.file.package}.{service.name}")
        yield ""
        yield from self.comment(path)
        for index, method in enumerate(service.method):
            yield f"**{method.name}**({self.call(method)})"
            yield ""
            yield from self.comment((*path, SERVICE_METHOD, index))

    def call(self, method: MethodDescriptorProto) -> str:
        asked = ("stream " if method.client_streaming else "") + self.type_link(method.input_type)
        told = ("stream " if method.server_streaming else "") + self.type_link(method.output_type)
        return f"{asked}) returns ({told}"

    def message(self, path: _Path, full: str, message: DescriptorProto) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield self.heading(2, full)
        yield ""
        yield from self.comment(path)
        told_oneofs: set[int] = set()
        for index, field in enumerate(message.field):
            is_oneof = field.HasField("oneof_index") and not field.proto3_optional
            if is_oneof and field.oneof_index not in told_oneofs:
                told_oneofs.add(field.oneof_index)
                yield f"One of `{message.oneof_decl[field.oneof_index].name}`:"
                yield ""
                yield from self.comment((*path, MESSAGE_ONEOF, field.oneof_index))
            yield f"- `{field.name}` = {field.number}, {self.type_text(field, message)}"
            yield ""
            yield from self.comment((*path, MESSAGE_FIELD, index), "    ")
        for index, nested in enumerate(message.nested_type):
            yield from self.message((*path, MESSAGE_NESTED, index), f"{full}.{nested.name}", nested)
        for index, enum in enumerate(message.enum_type):
            yield from self.enum((*path, MESSAGE_ENUM, index), f"{full}.{enum.name}", enum)

    def enum(self, path: _Path, full: str, enum: EnumDescriptorProto) -> Iterator[str]:
        yield self.heading(2, full)
        yield ""
        yield from self.comment(path)
        for index, value in enumerate(enum.value):
            yield f"- `{value.name}` = {value.number}"
            yield ""
            yield from self.comment((*path, ENUM_VALUE, index), "    ")

    def type_text(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entry = next((one for one in message.nested_type if field.type_name.endswith(f".{one.name}")), None)
        if entry is not None and entry.options.map_entry:
            key, value = entry.field
            return f"map from {self.type_text(key, entry)} to {self.type_text(value, entry)}"
        is_repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
        word = "repeated " if is_repeated else "optional " if field.proto3_optional else ""
        return word + (self.type_link(field.type_name) if field.type_name else _SCALAR[field.type])

    def type_link(self, full: str) -> str:
        name = full.removeprefix(f".{self.file.package}.").removeprefix(".")
        return f"[{name}]({self.places[full]})" if full in self.places else f"`{name}`"


def _escaped(line: str) -> str:
    """A line of a comment as Markdown, in which `code` stays what it is."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        part if part.startswith("`") else html.escape(part, quote=False).replace("*", r"\*") for part in parts
    )
