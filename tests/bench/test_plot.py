"""Pictures of a sweep: what is drawn where, and files that are none."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from jpaged.bench.results import draw, require_drawable
from jpaged.errors import InvalidArgument


def run(rate: float | str, ttft_ms: float) -> dict:
    names = {"median": 1, "p50": 1, "p99": 3, "p90": 2, "p10": 0.5, "mean": 1, "std": 1}
    latencies = {f"{word}_ttft_ms": factor * ttft_ms for word, factor in names.items()}
    return {"request_rate": rate, "request_throughput": 7.0, "output_throughput": 2 * ttft_ms, **latencies}


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that were saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def note(figure: Figure, *arguments, **options) -> None:
        saved.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    return saved


def test_latencies_and_throughput_are_drawn_against_the_rate(figures, tmp_path: Path):
    draw({"ours": [run("inf", 40.0), run(2.0, 10.0), run(4.0, 20.0)]}, tmp_path / "a.png", "a title")
    (figure,) = figures
    latency, throughput = figure.axes
    curves = {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in latency.lines}
    assert curves == {
        "median": [(2.0, 10.0), (4.0, 20.0), (4.8, 40.0)],
        "p90": [(2.0, 20.0), (4.0, 40.0), (4.8, 80.0)],
        "p99": [(2.0, 30.0), (4.0, 60.0), (4.8, 120.0)],
    }
    assert list(throughput.lines[0].get_ydata()) == [20.0, 40.0, 80.0]
    assert [label.get_text() for label in latency.get_xticklabels()] == ["2", "4", "inf"]
    assert (latency.get_ylabel(), latency.get_xlabel()) == ("TTFT, ms", "requests/s sent")
    pixels = matplotlib.image.imread(tmp_path / "a.png").shape
    assert pixels[:2] == (round(4.2 * 160), round(9.2 * 160))


def test_curves_of_two_servers_have_names_and_all_at_once_alone_is_drawn_at_what_it_reached(figures, tmp_path: Path):
    draw({"ours": [run("inf", 1.0)], "theirs": [run("inf", 2.0)]}, tmp_path / "a.svg", "a title")
    latency = figures[0].axes[0]
    assert [line.get_label() for line in latency.lines][:2] == ["ours, median", "ours, p90"]
    assert list(latency.lines[0].get_xdata()) == [7.0]


@pytest.mark.parametrize(
    ("name", "message"), [("a.doc", "does not end with one of"), ("b/a.png", "is a folder, or in none")]
)
def test_a_file_that_cannot_be_a_picture_is_named(tmp_path: Path, name, message):
    with pytest.raises(InvalidArgument, match=message):
        require_drawable(tmp_path / name)
