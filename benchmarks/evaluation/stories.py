"""The tasks' texts, from the grammar of the demo's stories; `python -m benchmarks.evaluation.stories` writes them.

Documents of this seed are none that the demo model was trained on.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.demo_model.stories.cast import Wishes
from benchmarks.demo_model.stories.grammar import Story, random_story
from jpaged import json_text

TASKS = Path(__file__).parent / "tasks"
FILE = TASKS / "stories.jsonl"
NUM_STORIES = 240
_NUM_READ, _NUM_CHOICES = 3, 4
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")
_CLAUSE_END = re.compile(r"[.!?,]")


def rows() -> list[dict[str, Any]]:
    """Each story: how it begins, four ways to go on, half a sentence and its rest, what its hero may be, all of it."""
    rng = Random("lm-evaluation-harness")
    stories: list[Story] = []
    while len(stories) < NUM_STORIES:
        story = random_story(rng, Wishes())
        if len(_SENTENCE_END.split(story.text)) > _NUM_READ:
            stories.append(story)
    sentences = [_SENTENCE_END.split(story.text) for story in stories]
    return [_row(rng, i, stories, sentences) for i in range(NUM_STORIES)]


def _row(rng: Random, index: int, stories: list[Story], sentences: list[list[str]]) -> dict[str, Any]:
    others = [i for i in rng.sample(range(NUM_STORIES), 3 * _NUM_CHOICES) if i != index]
    endings = [sentences[i][_NUM_READ] for i in [index, *others[: _NUM_CHOICES - 1]]]
    nouns = list(dict.fromkeys(stories[i].cast.hero.kind.noun for i in [index, *others]))[:_NUM_CHOICES]
    answer, kind = endings[0], nouns[0]
    rng.shuffle(endings)
    rng.shuffle(nouns)
    beginning = " ".join(sentences[index][:_NUM_READ])
    words = _CLAUSE_END.split(answer)[0].split(" ")
    num_given = len(words) // 2
    return {
        "beginning": beginning,
        "endings": endings,
        "answer": endings.index(answer),
        "begun": " ".join([beginning, *words[:num_given]]),
        "rest": " ".join(words[num_given:]),
        "kinds": nouns,
        "kind": nouns.index(kind),
        "story": stories[index].text,
    }


def main() -> None:
    """Write tasks/stories.jsonl."""
    FILE.write_text("".join(f"{json_text.dumps(row)}\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
