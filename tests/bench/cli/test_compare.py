"""`jpaged bench compare`: the table, the numbers, and an exit code for what cannot be compared."""

import json
from pathlib import Path

from jpaged.cli.main import main


def write(path: Path, **fields: object) -> str:
    path.write_text(json.dumps({"seed": 0, "request_rate": "inf", "output_throughput": 100.0, **fields}))
    return str(path)


def test_two_files_are_a_table_and_an_exit_code(tmp_path: Path, capsys):
    a, b = write(tmp_path / "a.json"), write(tmp_path / "b.json", output_throughput=125.0)
    assert main(["bench", "compare", a, b]) == 0
    shown = capsys.readouterr()
    assert [word for word in ("output_throughput", "1.250", "better") if word not in shown.out] == []
    assert shown.err == ""
    assert main(["bench", "compare", a, b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ratios": [
            {"request_rate": "inf", "metric": "output_throughput", "a": 100.0, "b": 125.0, "ratio": 1.25},
        ],
        "differences": [],
    }


def test_two_sweeps_are_one_picture(tmp_path: Path, capsys):
    runs = [
        {"request_rate": rate, "request_throughput": rate, "output_throughput": 9.0, "median_ttft_ms": 3.0}
        for rate in (1.0, 2.0)
    ]
    a, b = write(tmp_path / "a.json", runs=runs), write(tmp_path / "b.json", runs=runs)
    assert main(["bench", "compare", a, b, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "c.json").write_text('{"avg_latency": 1.0}')
    assert main(["bench", "compare", a, str(tmp_path / "c.json"), "--plot", str(tmp_path / "a.png")]) == 2
    assert "--plot: draws results of `bench serve`" in capsys.readouterr().err


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys):
    a, b = write(tmp_path / "a.json"), write(tmp_path / "b.json", seed=1)
    assert main(["bench", "compare", a, b]) == 1
    assert capsys.readouterr().err == "not comparable: seed: 0 and 1\n"


def test_a_file_that_is_no_result_is_named(tmp_path: Path, capsys):
    assert main(["bench", "compare", write(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "FILE: " in capsys.readouterr().err
