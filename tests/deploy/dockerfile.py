"""Reads a Dockerfile as far as the checks need: instructions in order, stages, what the last one starts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword in capitals, its words, and the stage (from 0) that it belongs to."""

    keyword: str
    text: str
    stage: int

    @property
    def words(self) -> list[str]:
        """The JSON form, or the text split at blanks."""
        return list(json.loads(self.text)) if self.text.startswith("[") else self.text.split()


class Dockerfile:
    """One file, parsed."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        stage = -1
        for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
            keyword, _, rest = line.strip().partition(" ")
            stage += keyword.upper() == "FROM"
            self.instructions.append(Instruction(keyword.upper(), rest.strip(), stage))
        self.num_stages = stage + 1

    def all(self, keyword: str, *, last_stage: bool = True) -> list[Instruction]:
        """The instructions of a keyword, of the image itself unless told otherwise."""
        found = [each for each in self.instructions if each.keyword == keyword]
        return [each for each in found if each.stage == self.num_stages - 1] if last_stage else found

    def text(self, keyword: str) -> str:
        """What the image's last instruction of a keyword says; "" where there is none."""
        return next((each.text for each in reversed(self.all(keyword))), "")

    @property
    def entrypoint(self) -> list[str]:
        return self.all("ENTRYPOINT")[-1].words

    @property
    def environment(self) -> dict[str, str]:
        pairs = (word.partition("=") for each in self.all("ENV") for word in each.words)
        return {name: value for name, _, value in pairs}

    @property
    def health_command(self) -> list[str]:
        """The words after CMD."""
        command = re.search(r"\bCMD\s+(\[.*\])$", self.text("HEALTHCHECK"))
        return list(json.loads(command.group(1))) if command else []

    @property
    def copied(self) -> list[str]:
        """Paths that come from the build's context."""
        copies = [each for each in self.all("COPY", last_stage=False) if not each.text.startswith("--from=")]
        return [word.removeprefix("./") for each in copies for word in each.words[:-1]]


def load(name: str) -> Dockerfile:
    """deploy/docker/Dockerfile.NAME."""
    return Dockerfile((ROOT / "deploy" / "docker" / f"Dockerfile.{name}").read_text())


def is_in_context(path: str, ignore: str) -> bool:
    """Whether .dockerignore lets a path in: the last pattern that matches it, or a folder above it, decides."""
    is_in = True
    for pattern in (line.strip() for line in ignore.splitlines()):
        if pattern and not pattern.startswith("#"):
            parts = re.split(r"(\*\*/|\*)", pattern.removeprefix("!"))
            wanted = "".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
            if re.fullmatch(f"{wanted}(?:/.*)?", path):
                is_in = pattern.startswith("!")
    return is_in
