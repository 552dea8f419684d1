"""Numbers that a reader of the tree feels: they may fall, and then this file is edited, and never rise."""

from pathlib import Path

from tests.arch import house_rules
from tests.arch.word_list import count_hits

ROOT = Path(__file__).resolve().parents[2]
MAX_PACKAGE_FILES = 764
MAX_WORD_HITS = 5554


def test_the_package_does_not_grow_in_files():
    files = [s.path for s in house_rules.sources(ROOT) if s.module and not s.path.startswith(house_rules.GENERATED)]
    assert len(files) <= MAX_PACKAGE_FILES


def test_texts_do_not_gain_words_to_avoid():
    counts = count_hits(ROOT)
    assert counts["behind"] > 0
    assert counts.total() <= MAX_WORD_HITS, counts


def test_a_planted_word_is_counted(tmp_path):
    (tmp_path / "jpaged").mkdir()
    (tmp_path / "jpaged/a.py").write_text('"""What somebody told."""\nX = 1  # behind it\n')
    (tmp_path / "README.md").write_text("It goes on.\n```\nIt goes on.\n```\n")
    assert count_hits(tmp_path) == {"opens with a clause": 1, "no actor": 1, "tell": 1, "behind": 1, "go on": 1}
