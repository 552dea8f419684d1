"""The words that docstrings, comments and pages avoid, and how often the tree still has them.

Each pattern is a habit that makes a reader read a sentence twice; the comment on its line names what to write instead.
`count_hits(root)` reads the files below `root` and imports nothing.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_EVERYWHERE = ("docstring", "comment", "page", "proto")
_WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    # "Return True if ...", "Return the ...": an imperative, or a noun phrase for classes and modules.
    "opens with a clause": (
        r"\A(?:What|Who|Whom|Whose|Whether|How|Where|When|Which|Why)\b(?![^\n]*\?)",
        ("docstring",),
    ),
    # client, caller, server, request, reader
    "no actor": (
        r"\b(?:somebody|nobody|anybody|everybody|whoever|whomever|those who"
        r"|who (?:asks|watches|calls|waits|arrives|reads|comes))\b",
        _EVERYWHERE,
    ),
    "tell": (r"\b(?:tell|tells|told|telling)\b", _EVERYWHERE),  # return, publish, log, reply, report
    "say": (r"\b(?:says|said)\b", _EVERYWHERE),  # states, returns, requires
    "so many": (r"\b(?:so many|so much|as many as|as many|as much as)\b", _EVERYWHERE),  # up to N
    "where there": (r"\bwhere (?:there|it|they|that|none|nothing|one|some|no)\b", _EVERYWHERE),  # if
    "but for": (r"\b(?:but for|all but|nothing but|none but)\b", _EVERYWHERE),  # except
    "behind": (r"\b(?:behind|in front of|beside|besides)\b", _EVERYWHERE),  # after, before, with, next to
    "go on": (r"\b(?:goes on|go on|went on|going on|gone on)\b", _EVERYWHERE),  # continue, resume
    "let go": (
        r"\b(?:let go|lets go|let in|lets in|take in|takes in|taken in|give back|gives back|given back"
        r"|hand(?:s|ed)? over|put aside|set aside|sets aside)\b",
        _EVERYWHERE,
    ),  # release, admit, accept, return, reserve
    "anew": (
        r"\b(?:anew|meanwhile|alike|for ever|whichever|however many|in vain|at the least|at the most)\b",
        _EVERYWHERE,
    ),  # again, at least, at most
    "under way": (r"\b(?:under way|on (?:its|their|the) way|is over|are over)\b", _EVERYWHERE),  # in flight, has ended
    "of ours": (r"\bof (?:ours|theirs|its own|their own|its|somebody)\b", _EVERYWHERE),  # name the owner
    "inverted opening": (
        r"(?:\A|[.:] )(?:Of|To|Behind|Beside|Besides|From|With|Nor|Not) [a-z]",
        _EVERYWHERE,
    ),  # subject first
    "causative": (r"\A(?:Has|Have) ", ("docstring",)),  # an imperative
    "passive relative": (
        r"\b(?:asked for|asked of|wanted|meant|is held|are held|is borne|is lacking)\b",
        _EVERYWHERE,
    ),  # requested, expected, stored
}
_PATTERNS = [(name, re.compile(pattern), kinds) for name, (pattern, kinds) in _WORDS.items()]
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def count_hits(root: Path) -> Counter[str]:
    """Return the number of places of each habit in docstrings, comments, pages and protos."""
    counts: Counter[str] = Counter()
    for kind, text in _texts(root):
        counts.update(
            {name: len(found) for name, rule, kinds in _PATTERNS if kind in kinds if (found := rule.findall(text))}
        )
    return counts


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((root / "jpaged").rglob("*.py")):
        if "_proto" in str(path.relative_to(root)):
            continue
        source = path.read_text()
        nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED))
        yield from (("docstring", text) for node in nodes if (text := ast.get_docstring(node)))
        if any(_may_hit(line[line.index("#") :]) for line in source.splitlines() if "#" in line):
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            yield from (("comment", token.string) for token in tokens if token.type == tokenize.COMMENT)
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        yield "page", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for path in sorted((root / "protos").rglob("*.proto")):
        yield "proto", "\n".join(re.findall(r"//(.*)", path.read_text()))


def _may_hit(text: str) -> bool:
    """Tell whether what is or contains a comment matches a pattern: only then is its file worth tokenizing."""
    return any(rule.search(text) for _, rule, kinds in _PATTERNS if "comment" in kinds)


def sentence_lengths(root: Path) -> list[int]:
    """Return the number of words of each sentence of the README and the pages; code, tables and headings have none."""
    lengths = []
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = re.sub(r"```.*?```", "\n\n", path.read_text(), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
            if paragraph.lstrip().startswith(("#", "|", "<", "!", ":::")):
                continue
            plain = re.sub(r"`[^`]*`", "code", re.sub(r"\A\s*(?:[-*]|\d+\.) ", "", paragraph))
            lengths += [len(words) for one in re.split(r"[.!?:](?=\s|$)", plain) if (words := one.split())]
    return lengths
