"""The protos follow their rules, and jpaged/_proto is what they generate."""

import importlib.util
import pickle
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2 as client_config_pb2
from tritonclient.grpc import service_pb2 as client_pb2

from jpaged._proto.open_inference import inference_pb2 as open_inference_pb2
from jpaged._proto.v1 import inference_pb2
from protos import generate, lint

GOOD = """\
syntax = "proto3";
package jpaged.v1;
import "google/protobuf/duration.proto";

// Says hello.
service GreetingService {
  // Greets once.
  rpc Greet(GreetRequest) returns (stream GreetResponse);
}
message GreetRequest {
  // How often. Default: 3.
  optional int32 count = 1;
  // To whom. Default: "".
  string name = 2;
  Manner manner = 3;  // How. Default: MANNER_UNSPECIFIED.
  // Further names.
  map<string, string> names = 4;
  // Either.
  oneof place {
    // At home. Default: 7.
    int32 house = 5;
  }
  // After so long.
  google.protobuf.Duration delay = 6;
}
message GreetResponse {
  // The words.
  string text = 1;
}
// How to greet.
enum Manner {
  MANNER_UNSPECIFIED = 0;
  // Warmly.
  MANNER_WARM = 1;
}
"""


def rules_broken(root: Path, text: str, path: str = "jpaged/v1/greeting.proto") -> list[str]:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return [violation.rule for violation in lint.lint(lint.compile_protos(root))]


def test_the_protos_follow_the_rules():
    assert [str(v) for v in lint.lint(lint.compile_protos(generate.PROTOS))] == []


def test_the_generated_code_is_current():
    assert generate.differences(generate.OUTPUT, generate.generate(generate.PROTOS)) == []


def test_a_good_file_breaks_no_rule(tmp_path):
    assert rules_broken(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("package jpaged.v1;", "package jpaged;", ["package-version", "package-directory"]),
        ("service GreetingService", "service Greeting", ["service-suffix"]),
        ("MANNER_UNSPECIFIED = 0;", "MANNER_COLD = 0;  // Coldly.", ["enum-zero"]),
        ("MANNER_WARM", "WARM", ["enum-prefix"]),
        ("  optional int32 count", "  int32 count", ["optional-default"]),
        ("  // The words.\n", "", ["comment"]),
        ("  // Greets once.\n", "", ["comment"]),
        ("// How to greet.\n", "", ["comment"]),
        ("string text", "string theText", ["case"]),
        ("rpc Greet(GreetRequest)", "rpc Greet(GreetResponse)", ["rpc-request"]),
        ("(stream GreetResponse)", "(GreetRequest)", ["rpc-response"]),
    ],
)
def test_a_planted_violation_is_found(tmp_path, old, new, rules):
    assert old in GOOD
    assert rules_broken(tmp_path, GOOD.replace(old, new)) == rules


def test_a_request_that_two_rpcs_share_is_found(tmp_path):
    second = GOOD[: GOOD.index("message GreetRequest")].replace("GreetingService", "OtherService")
    assert rules_broken(tmp_path, GOOD + second[second.index("// Says hello.") :]) == ["rpc-request"]


def test_a_default_counts_in_a_message_that_a_request_holds(tmp_path):
    text = GOOD.replace("  Manner manner = 3;", "  Inner inner = 7; // Nested.\n  Manner manner = 3;")
    text += "// Inside.\nmessage Inner {\n  // How much. Default: 0.5.\n  float share = 1;\n}\n"
    assert rules_broken(tmp_path, text) == ["optional-default"]


def test_generated_code_imports_from_its_package(tmp_path):
    (tmp_path / "jpaged/v1").mkdir(parents=True)
    (tmp_path / "jpaged/v1/greeting.proto").write_text(GOOD)
    (tmp_path / "jpaged/v1/types.proto").write_text(
        'syntax = "proto3";\npackage jpaged.v1;\nimport "jpaged/v1/greeting.proto";\n'
        "message Pair {\n  GreetRequest first = 1;\n}\n"
    )
    texts = generate.generate(tmp_path)
    assert sorted(texts) == [
        "__init__.py",
        "v1/__init__.py",
        "v1/greeting_pb2.py",
        "v1/greeting_pb2.pyi",
        "v1/greeting_pb2_grpc.py",
        "v1/types_pb2.py",
        "v1/types_pb2.pyi",
    ]
    for name in ("v1/greeting_pb2_grpc.py", "v1/types_pb2.py", "v1/types_pb2.pyi"):
        assert "from jpaged._proto.v1 import greeting_pb2" in texts[name]
        assert "from jpaged.v1" not in texts[name]


def test_generated_code_runs_with_the_installed_runtime(tmp_path):
    proto = GOOD.replace("jpaged.v1", "planted.v1")  # another package: the pool holds each name once
    (tmp_path / "protos/planted/v1").mkdir(parents=True)
    (tmp_path / "protos/planted/v1/planted.proto").write_text(proto)
    arguments = [*generate.protoc_arguments(tmp_path / "protos"), f"--python_out={tmp_path}"]
    assert protoc.main([*arguments, "planted/v1/planted.proto"]) == 0
    spec = importlib.util.spec_from_file_location("planted_pb2", tmp_path / "planted/v1/planted_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.GreetRequest().HasField("count")
    assert "planted_pb2" not in sys.modules


def test_writing_twice_changes_nothing_and_drift_is_named(tmp_path):
    wanted = {"__init__.py": "", "v1/x_pb2.py": "x = 1\n"}
    generate.write(tmp_path, wanted)
    before = (tmp_path / "v1/x_pb2.py").stat().st_mtime_ns
    generate.write(tmp_path, wanted)
    assert (tmp_path / "v1/x_pb2.py").stat().st_mtime_ns == before
    assert generate.differences(tmp_path, wanted) == []
    (tmp_path / "v1/x_pb2.py").write_text("x = 2\n")
    (tmp_path / "stray.py").write_text("")
    (tmp_path / "__init__.py").unlink()
    assert generate.differences(tmp_path, wanted) == [
        "__init__.py: is missing",
        "stray.py: nothing generates it",
        "v1/x_pb2.py: differs",
    ]


def test_a_message_survives_pickling():
    message = inference_pb2.GenerateRequest(text="hello")
    assert pickle.loads(pickle.dumps(message)) == message


def test_of_a_published_package_only_comments_and_case_are_asked(tmp_path):
    text = GOOD.replace("package jpaged.v1;", "package inference;").replace("GreetingService", "Greeting")
    text = text.replace("MANNER_UNSPECIFIED = 0;", "COLD = 0;  // Coldly.").replace("MANNER_UNSPECIFIED", "COLD")
    assert rules_broken(tmp_path, text, "other/greeting.proto") == []
    assert rules_broken(tmp_path, text.replace("  // The words.\n", ""), "other/greeting.proto") == ["comment"]


def test_the_messages_of_the_open_inference_protocol_have_the_published_names_and_numbers():
    published = [client_config_pb2.DESCRIPTOR, client_pb2.DESCRIPTOR]

    def differences_of(ours: Any, other: Any) -> Iterator[str]:
        for field in ours.fields:
            same = other.fields_by_name[field.name]
            if (field.number, field.type, field.is_repeated) != (same.number, same.type, same.is_repeated):
                yield field.full_name
            if field.message_type is not None:
                yield from differences_of(field.message_type, same.message_type)
            if field.enum_type is not None:
                numbers = {value.name: value.number for value in same.enum_type.values}
                yield from (value.name for value in field.enum_type.values if numbers[value.name] != value.number)

    for name, message in open_inference_pb2.DESCRIPTOR.message_types_by_name.items():
        (other,) = [file.message_types_by_name[name] for file in published if name in file.message_types_by_name]
        assert list(differences_of(message, other)) == []
    (service,) = open_inference_pb2.DESCRIPTOR.services_by_name.values()
    (theirs,) = client_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        same = theirs.methods_by_name[method.name]
        for side in ("input_type", "output_type"):
            assert getattr(method, side).full_name == getattr(same, side).full_name
        assert (method.client_streaming, method.server_streaming) == (same.client_streaming, same.server_streaming)


def test_messages_that_others_have_published_leave_those_of_others_alone_in_one_process():
    ours, theirs = open_inference_pb2.ModelInferRequest(id="x"), client_pb2.ModelInferRequest(id="x")
    assert ours.DESCRIPTOR.full_name == theirs.DESCRIPTOR.full_name
    assert ours.DESCRIPTOR.file.pool is not theirs.DESCRIPTOR.file.pool
    assert ours.SerializeToString() == theirs.SerializeToString()
    assert pickle.loads(pickle.dumps(ours)) == ours


def test_generated_code_runs_with_protobuf_6_and_with_what_is_required():
    required = tomllib.loads((generate.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = [one.partition(">=")[2] for one in required if one.startswith("protobuf>=")]
    assert floor.startswith("6.")
    texts = [path.read_text() for path in generate.OUTPUT.rglob("*_pb2.py")]
    versions = {found[1] for text in texts for found in re.finditer(r"# Protobuf Python Version: (.*)", text)}
    assert versions == {floor}
