"""Names that make a reader guess: classes that share a name, functions named `*_of`, and modules named by a verb form.

`count_names(root)` reads the package below `root` and imports nothing.
"""

import ast
from collections import Counter
from pathlib import Path

_GENERATED = "_proto"
_NOUNS = frozenset(
    {
        "routing",
        "sampling",
        "testing",
        "scoring",
        "pricing",
        "timing",
        "string",
        "tokenizing",
        "encoding",
        "sharding",
        "lowering",
    }
)
"""Words in -ing that the field uses as nouns."""


def count_names(root: Path) -> Counter[str]:
    """Return how many names of each habit the package defines."""
    counts: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for path in sorted((root / "jpaged").rglob("*.py")):
        if _GENERATED in path.parts:
            continue
        last_word = path.stem.rpartition("_")[2]
        if last_word.endswith("ing") and last_word not in _NOUNS:
            counts["gerund modules"] += 1
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.endswith("_of"):
                counts["functions named _of"] += 1
    counts["class names used twice"] = sum(number > 1 for number in classes.values())
    return counts
