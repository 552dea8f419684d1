"""Numbers that a reader of the tree feels: they may fall, and then this file is edited, and never rise."""

from pathlib import Path

from tests.arch import house_rules
from tests.arch.names import count_names
from tests.arch.word_list import count_hits, sentence_lengths

ROOT = Path(__file__).resolve().parents[2]
MAX_PACKAGE_FILES = 453
MAX_WORD_HITS = 22
MAX_NAMES = {"class names used twice": 0, "functions named _of": 7, "gerund modules": 0}
MAX_MEAN_SENTENCE, MAX_SENTENCE = 12.0, 43
"""Words of the sentences of the README and the pages."""


def test_the_package_does_not_grow_in_files():
    files = [s.path for s in house_rules.sources(ROOT) if s.module and not s.path.startswith(house_rules.GENERATED)]
    assert len(files) <= MAX_PACKAGE_FILES


def test_texts_do_not_gain_words_to_avoid():
    counts = count_hits(ROOT)
    assert counts["tell"] > 0
    assert counts.total() <= MAX_WORD_HITS, counts


def test_a_planted_word_is_counted(tmp_path):
    (tmp_path / "jpaged").mkdir()
    (tmp_path / "jpaged/a.py").write_text('"""What somebody told."""\nX = 1  # behind it\n')
    (tmp_path / "README.md").write_text("It goes on.\n```\nIt goes on.\n```\n")
    assert count_hits(tmp_path) == {"opens with a clause": 1, "no actor": 1, "tell": 1, "behind": 1, "go on": 1}


def test_names_that_make_a_reader_guess_do_not_gain():
    assert {name: number for name, number in count_names(ROOT).items() if number > MAX_NAMES[name]} == {}


def test_planted_names_are_counted(tmp_path):
    (tmp_path / "jpaged").mkdir()
    for name in ("nearing", "sampling"):
        (tmp_path / f"jpaged/{name}.py").write_text("class A:\n    def one_of(self): ...\n")
    assert count_names(tmp_path) == {"class names used twice": 1, "functions named _of": 2, "gerund modules": 1}


def test_sentences_of_pages_do_not_grow():
    lengths = sentence_lengths(ROOT)
    assert len(lengths) > 1000
    assert sum(lengths) / len(lengths) <= MAX_MEAN_SENTENCE
    assert max(lengths) <= MAX_SENTENCE


def test_sentences_are_counted_without_code_and_tables(tmp_path):
    (tmp_path / "README.md").write_text(
        "# A heading\n\nOne two `three four`. Five?\n\n| a | b |\n\n- six\n- seven eight\n"
    )
    assert sentence_lengths(tmp_path) == [3, 1, 1, 2]
