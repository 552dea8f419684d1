"""The links of the repository's documents, as links of the site.

A document links to files as they lie in the repository. Documents are pages of the site; any other file that a page
links to is copied into it, so that the site is whole by itself. A folder has no page: its link becomes its name.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES: Mapping[str, str] = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Documents outside of docs/, and their pages."""
FILES = "repository"
"""The folder of the site for files that pages link to."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#")


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"{FILES}/{path}")


def unlisted(config: str) -> list[str]:
    """Return the documents of docs/ that mkdocs.yml gives no place."""
    listed = set(re.findall(r": ([\w./-]+\.md)$", config, re.MULTILINE))
    return sorted({path.name for path in (ROOT / "docs").glob("*.md")} - listed)


def linked(text: str, source: str) -> Iterator[str]:
    """Yield the files of the repository that a document at `source` links to, itself left out."""
    for part in _outside_of_code(text):
        for match in _LINK.finditer(part):
            path = _path(match[3], source)
            if path is not None and path != source and (ROOT / path).is_file():
                yield path


def rewritten(text: str, source: str) -> str:
    """Return a document at `source` with links of the site; what leads nowhere stays, for the build to refuse."""
    here = posixpath.dirname(site_path(source))

    def replace(match: re.Match[str]) -> str:
        path = _path(match[3], source)
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return match[2]
        if not (ROOT / path).is_file():
            return match[0]
        anchor = match[3].partition("#")[2]
        target = posixpath.relpath(site_path(path), here or ".") + (f"#{anchor}" if anchor else "")
        return f"{match[1]}[{match[2]}]({target})"

    parts = _outside_of_code(text)
    for part in parts:
        text = text.replace(part, _LINK.sub(replace, part), 1) if _LINK.search(part) else text
    return text


def _path(target: str, source: str) -> str | None:
    """The path in the repository that a link leads to; None where it leads elsewhere or to a place on its page."""
    if _ELSEWHERE.match(target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def _outside_of_code(text: str) -> list[str]:
    """The lines outside of fenced blocks, one by one."""
    lines, is_code = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            lines.append(line)
    return lines
