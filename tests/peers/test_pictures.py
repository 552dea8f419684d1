"""The picture of the records: every ratio and both servers are in it."""

import pytest
from matplotlib.figure import Figure

from benchmarks.peers import pictures
from benchmarks.peers.serving import AT_ONCE


def row(**peers):
    return {"peers": {name.replace("_", "."): {"wall_s": [seconds], "about": {}} for name, seconds in peers.items()}}


def point(rate, tpot_ms):
    return {"rate": rate, "median_tpot_ms": tpot_ms, "output_throughput": 100.0}


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are saved."""
    figures = []
    save = Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


RECORDS = {
    "S": {
        "rows": {
            "W5": row(jpaged=2.0, vllm=3.0, llama_cpp=1.0),
            "W2": row(jpaged=1.0, vllm=4.0),
            "start": row(jpaged=1, vllm=9),
        }
    }
}


def heights(ax):
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}


def test_each_peer_has_a_bar_in_each_workload_that_it_ran(drawn, tmp_path):
    pictures.draw(RECORDS, tmp_path / "peers.png")
    (ax,) = drawn[0].axes
    assert heights(ax) == {"vllm": [4.0, 1.5], "llama.cpp": [0.5]}
    assert [label.get_text() for label in ax.get_xticklabels()] == ["S W2", "S W5"]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_servers_are_drawn_by_rate_without_the_run_of_all_at_once(drawn, tmp_path):
    points = {"jpaged": [point(AT_ONCE, 9.0), point("2.5", 4.0), point("1.0", 3.0)], "vllm": [point("1.0", 6.0)]}
    records = {"S": {"rows": {**RECORDS["S"]["rows"], "serve": {"points": points}}}}
    pictures.draw(records, tmp_path / "peers.png")
    _, times, _ = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in times.lines}
    assert lines == {"jpaged's server": [[1.0, 3.0], [2.5, 4.0]], "vllm's server": [[1.0, 6.0]]}


def test_servers_that_were_not_measured_take_no_room(drawn, tmp_path):
    records = {"S": {"rows": {**RECORDS["S"]["rows"], "serve": {"missing": "no vLLM"}}}}
    pictures.draw(records, tmp_path / "peers.png")
    assert len(drawn[0].axes) == 1
