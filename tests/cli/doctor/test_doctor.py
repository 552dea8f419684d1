"""`jpaged doctor`: what it finds, what it says of what is missing, and when its exit code is 1."""

import ast
import json
import re
import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jpaged.cli import doctor, packages
from jpaged.cli.doctor import DoctorReport
from jpaged.cli.main import main
from jpaged.config import ENVIRONMENT, EngineConfig, engine_config, explain_environment
from jpaged.version import __version__

HERE = {"platform": "cpu", "device_kind": "cpu", "num_devices": 1, "hardware": None}
HERE |= {"available_bytes": 1 << 33, "physical_bytes": 1 << 34}
KERNELS = {"library": "lib.so", "attention": "avx2", "products": "avx2"}
MODEL = {
    "architecture": "A",
    "dtype": "float32",
    "dtype_reason": "",
    "attention_backend": "cpu",
    "linear_backend": "cpu",
    "activation_dtype": "model",
    "kv_cache_dtype": "int8",
    "max_model_len": 64,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "memory_utilization": 0.9,
    "weight_bytes": 100,
    "memory_bytes": 1000,
    "passed_over": [],
}
WHOLE = DoctorReport({"devices": HERE, "kernels": KERNELS, "model": MODEL}, None)


def by_name(findings):
    return {one.name: one for one in findings}


@pytest.fixture
def answered(monkeypatch):
    """The child has answered so; the test may take another answer."""
    answers = [WHOLE]
    monkeypatch.setattr(doctor, "run_checks", lambda options, timeout_s: answers[-1])
    return answers


@pytest.mark.long
def test_the_embedded_model_is_looked_at_by_a_real_child(capsys):
    assert main(["doctor", "--json", "--port", "0", "--timeout", "600"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in said["findings"]}
    assert (said["version"], said["ok"]) == (__version__, True)
    assert found["dtype"]["value"] == "float32"
    assert found["attention_backend"]["value"] == "cpu"
    assert found["CPU kernels"]["value"].endswith("libjpaged_cpu.so")
    assert found["products"]["value"].split()[0] in doctor._INSTRUCTIONS
    assert found["port"]["value"] == "any free port"
    assert found["cpu"]["group"] == "devices"


@pytest.mark.long
def test_a_model_that_is_not_here_is_not_downloaded(capsys):
    assert main(["doctor", "nobody/such-model", "--json", "--port", "0", "--timeout", "600"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["model"]["state"] == "warn"
    assert "would download it" in found["model"]["note"]


@pytest.mark.long
def test_a_model_that_cannot_be_served_is_said_with_the_reason(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"]}')
    assert main(["doctor", str(tmp_path), "--json", "--port", "0", "--timeout", "600"]) == 1
    said = json.loads(capsys.readouterr().out)
    (stop,) = [one for one in said["findings"] if one["state"] == "stop"]
    assert (said["ok"], stop["name"]) == (False, "model")
    assert "Nothing" in stop["note"]


def test_options_are_checked_as_those_of_serve(answered, capsys):
    assert main(["doctor", "--max-num-seqs", "0"]) == 2
    assert "--max-num-seqs: 0 is below the limit of 1" in capsys.readouterr().err
    assert main(["doctor", "--timeout", "nan"]) == 2
    assert "--timeout: nan is not a finite number above 0" in capsys.readouterr().err


def test_what_is_found_is_a_table_with_a_verdict(answered, capsys):
    assert main(["doctor", "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^  ok    kv_cache_dtype +int8$", said, re.MULTILINE)
    assert said.splitlines()[-1] == "No problem found that prevents `jpaged serve demo`."
    groups = re.findall(r"^(\w+)$", said, re.MULTILINE)
    assert groups == ["program", "packages", "optional", "devices", "kernels", "model", "machine", "environment"]


def test_what_stops_a_server_is_the_verdict(answered, capsys):
    answered.append(DoctorReport({"devices": {"error": "no device", "kind": "RuntimeError"}}, None))
    assert main(["doctor", "--port", "0"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "Problems that prevent `jpaged serve demo` (1): devices"
    assert "        no device" in said


def test_a_port_that_is_taken_stops_a_server(answered, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port), "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (found["port"]["state"], found["port"]["value"]) == ("stop", f"127.0.0.1:{port}")
    assert "in use" in found["port"]["note"]


# --- the child ----------------------------------------------------------------------------------------------------


def ask(program):
    return doctor.run_checks({}, 60.0, (sys.executable, "-c", program))


@pytest.mark.long
def test_a_child_that_hangs_is_ended_and_what_it_said_before_counts():
    program = 'echo "$1"; exec sleep 1000000'  # a shell is there at once, also where Python takes its time
    answer = doctor.run_checks({}, 5.0, ("sh", "-c", program, "sh", json.dumps({"devices": HERE})))
    assert answer == DoctorReport({"devices": HERE}, "no answer within 5 s")
    found = list(doctor.device_findings(answer))
    assert found[0].value == "1 x cpu"
    assert (found[-1].name, found[-1].state) == ("kernels", "stop")
    assert found[-1].note == "while loading the CPU kernels: no answer within 5 s"


def test_a_child_that_crashes_is_told_with_its_last_words():
    answer = ask("import os, sys; print('noise'); print('the driver is gone', file=sys.stderr, flush=True); os.abort()")
    assert answer == DoctorReport({}, "the process exited with code -6: the driver is gone")
    (stop,) = doctor.device_findings(answer)
    assert (stop.name, stop.state) == ("devices", "stop")


def test_an_error_that_the_child_tells_is_its_end():
    said = json.dumps({"devices": {"error": "no platform", "kind": "RuntimeError"}})
    assert ask(f"import sys; print({said!r}); sys.exit(1)").end is None


def test_kernels_that_were_not_built_turn_off_speed_alone():
    answer = DoctorReport({**WHOLE.found, "kernels": {"missing": "lib.so was not built"}}, None)
    found = by_name(doctor.device_findings(answer))
    assert found["CPU kernels"].state == "off"
    assert found["CPU kernels"].remedy == "python -m jpaged.kernels.cpu.build"
    assert "lib.so was not built" in found["CPU kernels"].note


@pytest.mark.parametrize(
    ("changes", "state", "value"),
    [
        ({"weight_bytes": 900}, "stop", "weights 900 bytes; jpaged may use 0.9 of 1000 bytes"),
        ({"weight_bytes": 899}, "ok", "weights 899 bytes; jpaged may use 0.9 of 1000 bytes"),
        ({"memory_bytes": None}, "ok", "weights 100 bytes; the device does not report its memory"),
    ],
)
def test_weights_that_do_not_fit_stop_a_server(changes, state, value):
    found = by_name(doctor.device_findings(DoctorReport({**WHOLE.found, "model": {**MODEL, **changes}}, None)))
    assert (found["memory"].state, found["memory"].value) == (state, value)


def test_backends_that_are_passed_over_are_told_with_the_reason():
    answer = DoctorReport({**WHOLE.found, "model": {**MODEL, "passed_over": ["attention xla, not cpu: why"]}}, None)
    found = by_name(doctor.device_findings(answer))
    assert (found["passed over"].state, found["passed over"].value) == ("warn", "attention xla, not cpu: why")


def test_a_data_type_that_is_not_the_checkpoints_is_told_with_the_reason():
    answer = DoctorReport({**WHOLE.found, "model": {**MODEL, "dtype_reason": "no AMX"}}, None)
    found = by_name(doctor.device_findings(answer))
    assert (found["dtype"].state, found["dtype"].value, found["dtype"].note) == ("ok", "float32", "no AMX")


# --- packages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Packages by name, as installed, and what jpaged requires."""
    versions = {"jpaged": __version__, "jax": "0.9.1", "numpy": "2.4.0"}
    wanted = ["jax>=0.10,<0.13", "numpy>=2.0", "grpcio>=1.85", "pyarrow>=20; extra == 'batch'"]

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: wanted if version(name) else None)
    return versions


def test_a_requirement_that_is_missing_or_too_old_stops_a_server(installed):
    found = by_name(packages.requirements())
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(("jax", "grpcio", "requirements"), "stop")
    assert (found["jax"].value, found["jax"].remedy) == ("0.9.1", "pip install 'jax<0.13,>=0.10'")
    assert found["grpcio"].value == "not installed"
    assert found["requirements"].value == "1 of 3 as required: jax 0.9.1, numpy 2.4.0"


def test_sources_that_are_not_installed_or_otherwise_are_told(installed):
    installed["jpaged"] = "0.0.9"
    assert by_name(packages.requirements())["jpaged"].value == "installed as 0.0.9"
    del installed["jpaged"]
    (found,) = packages.requirements()
    assert (found.name, found.state) == ("requirements", "warn")


def test_an_optional_package_that_is_missing_is_told_with_what_installs_it(installed):
    installed["pyarrow"] = "20.0"
    found = by_name(packages.extras())
    assert (found["pyarrow"].state, found["matplotlib"].state) == ("ok", "off")
    assert found["matplotlib"].note == "for plots of `jpaged bench`"
    assert found["matplotlib"].remedy == "pip install 'jpaged[bench]'"


def test_every_extra_for_users_is_looked_for():
    root = Path(__file__).resolve().parents[3]
    section = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[(?!\])", section, re.MULTILINE))  # some need no further package
    assert extras - {"dev", "docs", "envoy", "release", "eval"} == packages.EXTRAS.keys()


def test_an_accelerator_that_no_package_drives_is_told(installed, tmp_path):
    assert list(packages.undriven(tmp_path)) == []
    (tmp_path / "nvidia0").write_text("")
    (found,) = packages.undriven(tmp_path)
    assert (found.state, found.remedy) == ("warn", "pip install 'jpaged[cuda]'")
    installed["jax-cuda12-plugin"] = "0.10"
    assert list(packages.undriven(tmp_path)) == []


# --- the machine --------------------------------------------------------------------------------------------------


def test_a_cache_is_told_with_its_size(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "one").write_bytes(b"x" * 2048)
    (found,) = doctor.cache(tmp_path / "programs")
    assert found.state in ("ok", "warn")  # the disk of whoever tests may be full
    assert found.value.startswith(f"{tmp_path / 'programs'}: 2.0 KiB in use")


def test_a_cache_that_cannot_be_is_told(tmp_path):
    (found,) = doctor.cache(None)
    assert (found.state, found.value) == ("off", "disabled")
    (tmp_path / "file").write_text("")
    (found,) = doctor.cache(tmp_path / "file" / "programs")
    assert found.state == "warn"
    assert "is not writable" in found.note


def test_object_storage_of_programs_is_told(monkeypatch):
    monkeypatch.delenv("JPAGED_CACHE_URL", raising=False)
    assert list(doctor.shared_cache()) == []
    monkeypatch.setenv("JPAGED_CACHE_URL", "memory://me:pass@bucket/jpaged")
    (found,) = doctor.shared_cache()
    assert (found.state, found.value) == ("ok", "memory://bucket/jpaged")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, note in (
        ("gs://bucket", "gcsfs"),
        ("bucket", "is not a URL"),
        ("what://bucket", "Protocol not known: what"),
    ):
        monkeypatch.setenv("JPAGED_CACHE_URL", url)
        (found,) = doctor.shared_cache()
        assert found.state == "stop" and note in found.note


def test_few_open_files_are_told_with_a_remedy(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda number: (256, 4096))
    found = by_name(doctor.limits(512))
    assert (found["open files"].state, found["open files"].remedy) == ("warn", "ulimit -n 1024")
    assert (found["address space"].state, found["address space"].value) == ("warn", "256 bytes")
    assert by_name(doctor.limits(128))["open files"].state == "ok"


def test_a_host_that_is_none_stops_a_server():
    found = by_name(doctor.ports(EngineConfig.load({"host": "192.0.2.1"})))
    assert found["port"].state == "stop"


@pytest.mark.parametrize(("name", "kind"), [("pin_prefix", "file"), ("compiled", "folder")])
def test_a_path_that_leads_nowhere_stops_a_server(tmp_path, name, kind):
    (tmp_path / "file").write_text("")
    here = tmp_path / "file" if kind == "file" else tmp_path
    assert by_name(doctor.files(EngineConfig.load({name: str(here)})))[name].state == "ok"
    found = by_name(doctor.files(EngineConfig.load({name: str(tmp_path / "nowhere")})))[name]
    assert (found.state, found.note) == ("stop", f"there is no such {kind}")


@pytest.mark.parametrize("name", ["batch_dir", "audit_log"])
def test_what_is_made_need_not_be_there(tmp_path, name):
    (tmp_path / "file").write_text("")
    for path, state in ((tmp_path / "new", "ok"), (tmp_path / "file" / "new", "stop")):
        assert by_name(doctor.files(EngineConfig.load({name: str(path)})))[name].state == state
    is_there = tmp_path / "file" if name == "audit_log" else tmp_path
    assert by_name(doctor.files(EngineConfig.load({name: str(is_there)})))[name].state == "ok"
    is_other = tmp_path if name == "audit_log" else tmp_path / "file"
    assert by_name(doctor.files(EngineConfig.load({name: str(is_other)})))[name].state == "stop"


def test_a_port_with_a_host_of_its_own_is_looked_at_there():
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        found = by_name(doctor.ports(EngineConfig.load({"control_port": port, "control_host": "127.0.0.2"})))
    assert (found["control_port"].state, found["control_port"].value) == ("stop", f"127.0.0.2:{port}")


def test_one_of_several_processes_is_told(monkeypatch):
    for name in ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert list(doctor.processes(EngineConfig.load({"num_processes": 1}))) == []
    together = {"num_processes": 2, "process_id": 1, "coordinator": "host:1"}
    (found,) = doctor.processes(EngineConfig.load(together))
    assert found.value == "1 of 2, process 0 at host:1 (the options)"
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "leader")
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    monkeypatch.setenv("LWS_WORKER_INDEX", "7")
    (found,) = doctor.processes(EngineConfig())
    assert (found.state, found.remedy) == ("stop", "--num-processes 1")


def test_every_variable_that_is_read_is_told(monkeypatch):
    tree = ast.parse(Path(str(engine_config.__file__)).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Subscript)]
    read = {
        word.value
        for node in calls
        if ast.unparse(node).startswith("os.environ")
        for word in (node.args[:1] if isinstance(node, ast.Call) else [node.slice])
        if isinstance(word, ast.Constant)
    }
    assert read == ENVIRONMENT.keys()


def test_variables_are_told_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("JPAGED_API_KEY", "secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("JPAGED_CACHE_DIR", "/some/folder")
    monkeypatch.delenv("JPAGED_TRACEBACK", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://me:pass@mirror/hub")
    monkeypatch.setenv("SLURM_JWT", "eyJ.x.y")
    monkeypatch.setenv("OMPI_DB_PASS", "x")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,apikey=x,authorization=Bearer y,n=1")
    monkeypatch.setenv("JAX_SETTINGS", '{"password":0x1,"b":2}')
    told = {name: value for name, value, _ in explain_environment()}
    assert (told["SLURM_JWT"], told["OMPI_DB_PASS"]) == ("(set)", "(set)")
    assert told["OTEL_RESOURCE_ATTRIBUTES"] == "service.name=a,apikey=(set),authorization=(set),n=1"
    assert told["JAX_SETTINGS"] == '{"password":"(set)","b":2}'  # not JSON
    assert (told["HF_TOKEN"], told["JPAGED_CACHE_DIR"], told["JPAGED_TRACEBACK"]) == ("(set)", "/some/folder", None)
    assert told["HF_ENDPOINT"] == "https://mirror/hub"
    assert (told["JPAGED_API_KEY"], told["TOKENIZERS_PARALLELISM"]) == ("(set)", "true")
    found = by_name(doctor.environment_findings())
    assert (found["JPAGED_TRACEBACK"].value, found["HF_TOKEN"].value) == ("not set", "(set)")
