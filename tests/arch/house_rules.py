"""The rules of docs/architecture.md as tables, and the one walk over the source tree that holds them.

`violations(root)` reads the files below `root` and imports nothing: a planted tree is checked like the real one.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# What each top-level name of jpaged may import, besides itself. `engine.executor` opens one module of a package.
VALUES = {
    *(
        "errors",
        "types",
        "distributed_env",
        "config",
        "version",
        "json_text",
        "server_load",
        "outputs",
        "sampling_params",
        "structured",
        "chat",
        "pool",
    ),
    "hardware",
}
MAY_IMPORT = {
    "version": set(),
    "hardware": set(),
    "json_text": {"errors"},
    "server_load": set(),
    "pool": set(),
    "errors": set(),
    "blockstore": {"errors"},  # files and bytes
    "structured": {"errors", "json_text", "version"},
    "chat": {"errors", "json_text", "version"},
    "sampling_params": {"errors", "structured"},
    "types": {"errors", "structured", "chat", "sampling_params", "version"},
    "outputs": {"errors", "types", "chat", "sampling_params"},
    "distributed_env": {"errors"},
    "config": {"errors", "types", "sampling_params", "distributed_env", "json_text", "structured"},
    "kernels": VALUES,
    "models": VALUES | {"kernels"},
    "checkpoints": VALUES | {"models", "demo", "kernels.matrix_format", "kernels.matmul", "kernels.cpu.library"},
    "device": VALUES | {"kernels", "models", "engine.executor", "engine.cascade_costs", "checkpoints.names"},
    "engine": VALUES | {"blockstore"},
    "_proto": set(),
    "openai": VALUES,
    "anthropic": VALUES | {"openai"},
    "ollama": VALUES | {"openai"},
    "client": VALUES | {"_proto", "openai"},
    "peers": VALUES | {"_proto", "client", "service"},
    "access": {"errors", "json_text", "config"},  # knows no protocol, and no request
    "service": VALUES | {"engine", "access"},
    "telemetry": VALUES | {"engine", "service"},
    "http": VALUES | {"engine", "service", "openai", "anthropic", "ollama", "telemetry", "access"},
    "server": VALUES
    | {"engine", "service", "_proto", "telemetry", "http", "access"}
    | {"client.channel", "client.errors"},  # of another server it is a client
    "testing": VALUES | {"engine"},
    "demo": set(),
    "kvevents": VALUES,
    "build": VALUES
    | {"blockstore", "kvevents", "kernels", "models", "checkpoints", "device", "engine", "service", "testing"},
    "local_model": VALUES | {"engine", "service", "telemetry", "build", "cli.vllm_flags"},
    "llm": VALUES | {"engine", "service", "local_model", "cli.vllm_flags"},
    "cli": VALUES
    | {
        "build",
        "client",
        "openai",
        "service",
        "server",
        "peers",
        "telemetry",
        "llm",
        "kernels",
    }
    | {"checkpoints.conversion", "checkpoints.gguf", "checkpoints.hub", "device.multihost", "device.device_info"},
    "__main__": {"cli", "version"},
    "__init__": VALUES | {"client", "llm"},
}

# Optional parts: the core imports none of them, and OPTIONAL_HOOKS are its files that name one. A part's command may
# import more than the part.
OPTIONAL: dict[str, set[str]] = {
    "plan": VALUES
    | {"models", "checkpoints", "device", "engine", "testing"}
    | {"client.routing", "route.prefix_table"},  # a fleet is simulated behind the router's own placement
    "plan.cli": VALUES | {"plan", "cli"},
    "bench": VALUES | {"client", "plan.cost"},
    "bench.cli": VALUES | {"bench", "plan", "cli", "client", "llm", "kernels", "checkpoints.gguf", "checkpoints.hub"},
    "route": VALUES
    | {"_proto", "access", "client", "kvevents"}
    | {f"server.{name}" for name in ("grpc_server", "health")}
    | {"telemetry.scrapes"},
    "route.cli": VALUES | {"route", "cli", "telemetry"},
    "inspector": VALUES | {"service", "http", "access"},
    "inspector.cli": VALUES | {"inspector", "cli", "client"},
    "evaluation": VALUES | {"client", "llm", "checkpoints.hub"},
    "ray": VALUES | {"llm"},
    "tunix": VALUES | {"llm", "checkpoints.hub", "checkpoints.names"},
}
OPTIONAL_HOOKS = {"jpaged/cli/main.py", "jpaged/http/app.py"}
MAY_IMPORT |= OPTIONAL

# Where a library may be imported; what is not listed may be imported anywhere.
_ARRAYS = {"device", "models", "checkpoints", "kernels", "tunix"}
_WIRE = {"client", "server", "route", "peers", "_proto"}
LIBRARY_HOMES: dict[str, set[str]] = {
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax"), _ARRAYS),
    **dict.fromkeys(("grpc", "grpc_health", "grpc_reflection", "grpc_status"), _WIRE),
    "httpx2": {"bench"},
    "starlette": {"http", "inspector"},
    "uvicorn": {"http"},
    "opentelemetry": {"telemetry", "client"},
    "smg_grpc_proto": {"server"},
    "llguidance": {"service"},
    "lm_eval": {"evaluation"},
    "mooncake": {"engine"},
    "tunix": {"tunix"},
    "pyarrow": {"client"},
    "ray": {"ray"},
    "torch": set(),
}
ENVIRONMENT_HOME = "jpaged/config/engine_config.py"
JSON_HOME = "jpaged/json_text.py"

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60  # its own: without docstring and nested functions
MAX_FOLDER_FILES = 25
MAX_PARAMETERS = 8  # without self and cls; tests take as many fixtures as they need
BANNED_FILES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
SKIPS = re.compile(r"\bpytest\.(mark\.)?(skip|skipif|xfail)\b|\bunittest\.skip|\bskip(Test|Unless|If)\b")
MAY_BE_MISSING = "torch"
BARE_OPENINGS = ("Of ", "To ")
DOCSTRING_READERS = {"__doc__", "getdoc", "getsource", "getsourcelines", "getcomments"}
NARROWING = re.compile(r"assert (isinstance\(.+\)|[\w.]+ is not None)")
GENERATED = "jpaged/_proto/"
_PART = re.compile(rf"jpaged\.({'|'.join(OPTIONAL)})(\.\w+)*\Z")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file with all nodes of its tree; `module` is dotted, and empty for a file outside jpaged."""

    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def module(self) -> str:
        if not self.path.startswith("jpaged/"):
            return ""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def top(self) -> str:
        """The folder or file below jpaged that the file belongs to."""
        return self.module.partition(".")[2].partition(".")[0] or "__init__"

    @property
    def key(self) -> str:
        """The key of MAY_IMPORT that the file belongs to; commands of optional parts have their own."""
        command = f"{self.top}.cli"
        is_command = f"{self.module}.".startswith(f"jpaged.{command}.") and command in MAY_IMPORT
        return command if is_command else self.top


@functools.cache
def sources(root: Path) -> list[Source]:
    """Return the Python files that the rules hold for, as they were at the first call."""
    folders = ("jpaged", "tests", "protos", "benchmarks", "docs")
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    texts = [(path.relative_to(root).as_posix(), path.read_text()) for path in paths]
    return [Source(path, text, tree := ast.parse(text), tuple(ast.walk(tree))) for path, text in texts]


def violations(root: Path) -> list[str]:
    """Return one line for each broken rule, as `path:line: what`."""
    files = sources(root)
    modules = {source.module for source in files if source.module}
    found = [line for source in files for line in _in_one_file(source, modules)]
    found += [line for folder, inside in _folders(files).items() for line in _in_one_folder(folder, inside)]
    graph = {s.module: set(_own_imports(s, modules).values()) - {s.module} for s in files if s.module}
    found += _foreign_writes(files)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"import cycle: {' <- '.join(error.args[1])}")
    return found


def _folders(files: list[Source]) -> dict[str, list[Source]]:
    """Return the files that lie in each folder."""
    folders: dict[str, list[Source]] = {}
    for source in files:
        path = Path(source.path)
        folders.setdefault(path.parent.as_posix(), []).append(source)
    return dict(sorted(folders.items()))


def _in_one_folder(folder: str, inside: list[Source]) -> Iterator[str]:
    if len(inside) > MAX_FOLDER_FILES:
        yield f"{folder}: {len(inside)} files, over the limit of {MAX_FOLDER_FILES}"
    if not inside[0].module:
        return
    init = next((source for source in inside if Path(source.path).name == "__init__.py"), None)
    if init is None:
        yield f"{folder}/__init__.py: is missing"
    elif folder != "jpaged" and not f"{folder}/".startswith(GENERATED):
        listed = _listed(ast.get_docstring(init.tree) or "")
        names = {Path(source.path).name for source in inside} - {"__init__.py"}
        yield from (f"{init.path}:1: does not say what {name} is" for name in sorted(names - listed))
        yield from (f"{init.path}:1: says what {name} is, which is not there" for name in sorted(listed - names))


def _listed(docstring: str) -> set[str]:
    """Return the files that a package's docstring lists, each as `name.py  what it is`."""
    return {match[1] for match in re.finditer(r"^(\w+\.py) +\S", docstring, re.MULTILINE)}


def _in_one_file(source: Source, modules: set[str]) -> Iterator[str]:
    if source.path.startswith(GENERATED):
        return
    if Path(source.path).name in BANNED_FILES:
        yield f"{source.path}:1: a file is named after the one noun it holds"
    if source.module:
        yield from _imports(source, modules)
    if source.module and source.path != ENVIRONMENT_HOME:
        for line in _environment_reads(source.nodes):
            yield f"{source.path}:{line}: only {ENVIRONMENT_HOME} reads the environment"
    if not source.path.startswith("tests/"):
        yield from _lost_when_optimized(source)
        yield from _json_writes(source)
    if source.path.startswith("tests/"):
        yield from _skips(source)
    yield from _bare_docstrings(source)
    yield from _sizes(source)


def _bare_docstrings(source: Source) -> Iterator[str]:
    """Yield the docstrings, those below constants too, that leave open what they are about."""
    strings = (node.value for node in source.nodes if isinstance(node, ast.Expr))
    for string in strings:
        if isinstance(string, ast.Constant) and str(string.value).lstrip().startswith(BARE_OPENINGS):
            yield f"{source.path}:{string.lineno}: a docstring names its subject"


def _json_writes(source: Source) -> Iterator[str]:
    """Python's own writer has names for numbers that are not finite, which JSON has not."""
    for node in source.nodes if source.module and source.path != JSON_HOME else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dump", "json.dumps"):
            yield f"{source.path}:{node.lineno}: only {JSON_HOME} writes JSON"


def _own_imports(source: Source, modules: set[str]) -> dict[tuple[int, str], str]:
    """Return the imported modules of jpaged, by line and dotted name; imports inside functions count."""
    found = {}
    for line, name in _imported_names(source.nodes):
        if name.partition(".")[0] == "jpaged":
            found[line, name] = name if name in modules else name.rpartition(".")[0]
    return found


def _imported_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _imports(source: Source, modules: set[str]) -> Iterator[str]:
    if source.top not in MAY_IMPORT:
        yield f"{source.path}:1: jpaged.{source.top} is not in the table of allowed imports"
        return
    allowed = {f"jpaged.{name}" for name in MAY_IMPORT[source.key] | {source.key}}
    for (line, name), module in _own_imports(source, modules).items():
        if not any(module == prefix or module.startswith(f"{prefix}.") for prefix in allowed):
            yield f"{source.path}:{line}: jpaged.{source.key} may not import {name}"
        elif source.key in OPTIONAL and source.key == source.top and module.startswith(f"jpaged.{source.top}.cli"):
            yield f"{source.path}:{line}: jpaged.{source.top} may not import its command"
    if source.top not in OPTIONAL and source.path not in OPTIONAL_HOOKS:
        for node in source.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _PART.match(node.value):
                yield f"{source.path}:{node.lineno}: only {sorted(OPTIONAL_HOOKS)} name an optional part"
    for line, name in _imported_names(source.nodes):
        library = name.partition(".")[0]
        if source.top not in LIBRARY_HOMES.get(library, {source.top}):
            yield f"{source.path}:{line}: jpaged.{source.top} may not import {library}"


def _environment_reads(nodes: Iterable[ast.AST]) -> Iterator[int]:
    readers = {"environ", "environb", "getenv", "getenvb", "putenv"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in readers:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in readers)


def _lost_when_optimized(source: Source) -> Iterator[str]:
    """Yield what `python -OO` changes: texts read from docstrings, asserts that do more than narrow a type."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            if (node.attr if isinstance(node, ast.Attribute) else node.id) in DOCSTRING_READERS:
                yield f"{source.path}:{node.lineno}: a docstring is not data"
        elif isinstance(node, ast.Assert) and not NARROWING.fullmatch(ast.unparse(node)):
            yield f"{source.path}:{node.lineno}: an assert narrows a type and does nothing else"


def _skips(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and SKIPS.fullmatch(ast.unparse(node)):
            yield f"{source.path}:{node.lineno}: no test is skipped or expected to fail"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("importorskip"):
            missing = [ast.unparse(argument).strip("'\"") for argument in node.args[:1]]
            if missing != [MAY_BE_MISSING]:
                yield f"{source.path}:{node.lineno}: only {MAY_BE_MISSING} may be missing in a test"


def _sizes(source: Source) -> Iterator[str]:
    if (lines := source.text.count("\n")) > MAX_FILE_LINES:
        yield f"{source.path}:1: {lines} lines, over the limit of {MAX_FILE_LINES}"
    for node in source.nodes:
        if not isinstance(node, _Function):
            continue
        if (lines := own_lines(node)) > MAX_FUNCTION_LINES:
            yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines, over the limit of {MAX_FUNCTION_LINES}"
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > MAX_PARAMETERS and not source.path.startswith("tests/"):
            text = f"{node.name} takes {count} parameters, over the limit of {MAX_PARAMETERS}"
            yield f"{source.path}:{node.lineno}: {text}"


def _foreign_writes(files: list[Source]) -> Iterator[str]:
    """Yield assignments to fields that classes of other folders declare, and no class of this folder."""
    ours = [source for source in files if source.module and not source.path.startswith(GENERATED)]
    fields: dict[Path, set[str]] = {}
    for source in ours:
        fields.setdefault(Path(source.path).parent, set()).update(_fields(source.nodes))
    everywhere = set().union(*fields.values())
    for source in ours:
        foreign = everywhere - fields[Path(source.path).parent]
        for node in _writes(source.nodes):
            if node.attr in foreign and ast.unparse(node.value) not in ("self", "cls"):
                yield f"{source.path}:{node.lineno}: {ast.unparse(node)} is written outside of its class's folder"


def _fields(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the fields that the classes of a module declare, in their bodies or by assigning them to self."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    declared = (node.target for one in classes for node in ast.walk(one) if isinstance(node, ast.AnnAssign))
    assigned = (node for one in classes for node in _writes(ast.walk(one)))
    names = {target.id for target in declared if isinstance(target, ast.Name)}
    return names | {field.attr for field in assigned if ast.unparse(field.value) == "self"}


def _writes(nodes: Iterable[ast.AST]) -> Iterator[ast.Attribute]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def own_lines(function: _Function) -> int:
    """Return the lines of a function from `def` to its end, without its docstring and nested functions."""

    def extent(node: ast.stmt) -> int:
        return (node.end_lineno or node.lineno) - node.lineno + 1

    first = function.body[0]
    docstring = extent(first) if ast.get_docstring(function, clean=False) is not None else 0
    return extent(function) - docstring - sum(extent(nested) for nested in _outermost_functions(function))


def _outermost_functions(node: ast.AST) -> Iterator[_Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield child
        else:
            yield from _outermost_functions(child)
