"""The protos follow their rules, and jpaged/_proto is what they generate."""

import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

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
