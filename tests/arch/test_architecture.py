"""The house keeps its rules, and the checker sees each of them broken."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.arch import house_rules

ROOT = Path(__file__).resolve().parents[2]
READS_ENVIRONMENT = "only jpaged/config/engine_config.py reads the environment"

# Paths of one machine, and hosts or indexes that only some machines reach. [x] keeps a pattern from matching itself.
PRIVATE = re.compile(
    rb"/wor[k]/|/roo[t]/|/hom[e]/\w|/User[s]/\w|/opt/(v3|vtorch|wheels|pypi)|/bash_job[s]"
    rb"|pyp[i]\.org|pythonhosted\.or[g]|download\.pytorc[h]\.org|--(extra-)?inde[x]-url|--find-link[s]"
)


def test_the_house_keeps_its_rules():
    assert house_rules.violations(ROOT) == []


def test_every_top_level_name_is_in_the_table_and_in_the_house():
    names = {source.top for source in house_rules.sources(ROOT) if source.module}
    assert names <= house_rules.MAY_IMPORT.keys()


def test_no_tracked_file_names_a_machine_or_an_index():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    paths = [path for path in listing.split("\0") if path and (ROOT / path).is_file()]
    assert paths
    assert [(path, found[0]) for path in paths if (found := PRIVATE.search((ROOT / path).read_bytes()))] == []


@pytest.mark.parametrize(
    "text",
    [
        b"see /wor" + b"k/x",
        b"cd /hom" + b"e/ann",
        b"pip install --inde" + b"x-url x",
        b"https://pyp" + b"i.org/simple",
    ],
)
def test_a_planted_machine_path_is_found(text):
    assert PRIVATE.search(text)


def test_properties_have_no_deadline_and_one_list_of_examples():
    profile = settings.get_profile(settings.get_current_profile_name())
    assert (profile.deadline, profile.derandomize) == (None, True)
    own = re.compile(r"settings\([^)]*\b(deadline|derandomize|database)=")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != ROOT / "tests/conftest.py"]
    assert [path.name for path in tests if own.search(path.read_text())] == []


def test_the_core_may_import_no_optional_part():
    tables = {key: names for key, names in house_rules.MAY_IMPORT.items() if key not in house_rules.OPTIONAL}
    assert "cli" in tables
    parts = {key for key in house_rules.OPTIONAL if "." not in key}
    assert [key for key, names in tables.items() if parts & {name.partition(".")[0] for name in names}] == []


def test_everything_but_the_array_side_imports_without_jax_and_the_core_without_optional_parts():
    core = {"__init__", "errors", "types", "config", "_proto", "client", "service", "server", "engine", "cli"}
    core |= {"openai", "anthropic", "ollama", "http", "telemetry", "kvevents", "access", "peers"}
    optional = {"bench", "route", "inspector", "plan.cli"}
    sources = [s for s in house_rules.sources(ROOT) if s.module and not s.module.endswith("__main__")]
    modules = [s.module for s in sources if s.top in core]
    assert "jpaged.types" in modules
    parts = [f"jpaged.{key}" for key in house_rules.OPTIONAL if "." not in key]
    program = (
        "import importlib, sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'orbax', 'optax', 'torch'): sys.modules[name] = None\n"
        f"for name in {parts!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"for name in {parts!r}: del sys.modules[name]\n"
        f"for name in {[s.module for s in sources if s.key in optional]!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


COUNTER = """class Executor:
    limit: int

    def __init__(self, other):
        self.num_steps = 0
        other.num_steps = 0
"""
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
NINE = "a, b, c, d, e, f, g, h, i"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (
            "jpaged/engine/a.py",
            "import jpaged.device.step\n",
            "engine may not import jpaged.device.step",
        ),
        ("jpaged/engine/a.py", "from jpaged.device import step\n", "engine may not import jpaged.device.step"),
        ("jpaged/engine/a.py", "from jpaged import device\n", "engine may not import jpaged.device"),
        (
            "jpaged/engine/a.py",
            "def f():\n    from jpaged.device import step\n",
            "may not import jpaged.device.step",
        ),
        (
            "jpaged/device/step.py",
            "from jpaged.engine import scheduler\n",
            "may not import jpaged.engine.scheduler",
        ),
        (
            "jpaged/server/a.py",
            "from jpaged.device.step import S\n",
            "server may not import jpaged.device.step.S",
        ),
        (
            "jpaged/client/a.py",
            "from jpaged.engine import scheduler\n",
            "client may not import jpaged.engine.scheduler",
        ),
        ("jpaged/errors.py", "import jpaged.client\n", "errors may not import jpaged.client"),
        ("jpaged/cli/a.py", "def f():\n    from jpaged.bench import a\n", "cli may not import jpaged.bench.a"),
        ("jpaged/cli/a.py", "X = 'jpaged.bench.a'\n", "name an optional part"),
        ("jpaged/engine/deep/a.py", "", "jpaged/engine/deep/__init__.py: is missing"),
        ("jpaged/novel/__init__.py", "", "jpaged.novel is not in the table"),
        ("jpaged/cli/__init__.py", "", "jpaged/cli/__init__.py:1: does not say what a.py is"),
        ("jpaged/cli/__init__.py", '"""A.\n\na.py  a\nz.py  z\n"""', "says what z.py is, which is not there"),
        ("jpaged/engine/a.py", "import jax.numpy as jnp\n", "engine may not import jax"),
        ("jpaged/client/a.py", "def f():\n    import flax\n", "client may not import flax"),
        ("jpaged/engine/a.py", "from grpc import aio\n", "engine may not import grpc"),
        ("jpaged/models/a.py", "import torch\n", "models may not import torch"),
        (
            "jpaged/cli/a.py",
            "import os\nx = os.environ['A']\n",
            READS_ENVIRONMENT,
        ),
        (
            "jpaged/cli/a.py",
            "import os\nx = os.getenv('A')\n",
            READS_ENVIRONMENT,
        ),
        ("jpaged/cli/a.py", "from os import environ\n", READS_ENVIRONMENT),
        ("jpaged/cli/a.py", "import json\nx = json.dumps(1)\n", "only jpaged/json_text.py writes JSON"),
        ("jpaged/cli/a.py", "x = __doc__\n", "a docstring is not data"),
        ("protos/a.py", "import inspect\nx = inspect.getdoc(inspect)\n", "a docstring is not data"),
        ("jpaged/cli/a.py", 'X = 1\n"""Of x."""\n', "jpaged/cli/a.py:2: a docstring names its subject"),
        ("tests/test_a.py", 'def test_a():\n    """To x."""\n', "tests/test_a.py:2: a docstring names its subject"),
        ("jpaged/cli/a.py", "def f(x): assert x > 0\n", "an assert narrows a type"),
        ("jpaged/cli/a.py", "def f(x): assert x is not None, 'no x'\n", "an assert narrows a type"),
        ("tests/utils.py", "", "named after the one noun"),
        ("tests/common.py", "", "named after the one noun"),
        ("jpaged/cli/a.py", "x = 1\n" * 901, "901 lines, over the limit of 900"),
        ("jpaged/cli/a.py", LONG_FUNCTION, "f has 61 lines, over the limit of 60"),
        ("jpaged/cli/a.py", f"def f({NINE}): pass\n", "f takes 9 parameters, over the limit of 8"),
        ("jpaged/cli/a.py", f"def f(*, {NINE}): pass\n", "f takes 9 parameters, over the limit of 8"),
        ("jpaged/cli/a.py", "def f(x):\n    x.num_steps = 1\n", "x.num_steps is written outside of its class"),
        ("jpaged/cli/a.py", "def f(x):\n    x.y.num_steps += 1\n", "x.y.num_steps is written outside of its class"),
        ("jpaged/cli/a.py", "def f(x):\n    del x.limit\n", "x.limit is written outside of its class"),
        ("tests/test_a.py", "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n", "no test is skipped"),
        ("tests/test_a.py", "import pytest\n@pytest.mark.skipif(True)\ndef test_a(): pass\n", "no test is skipped"),
        ("tests/test_a.py", "import pytest\ndef test_a(): pytest.skip('no')\n", "no test is skipped"),
        ("tests/test_a.py", "import pytest\n@pytest.mark.xfail\ndef test_a(): pass\n", "no test is skipped"),
        ("tests/test_a.py", "import pytest\npytest.importorskip('scipy')\n", "only torch may be missing"),
        ("jpaged/engine/a.py", "from jpaged.engine import scheduler\n", "import cycle: "),
    ],
)
def test_a_planted_violation_is_found(tmp_path, path, text, message):
    plant(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    found = house_rules.violations(tmp_path)
    assert len(found) == 1
    assert message in found[0]


def test_a_part_that_imports_its_command_is_found(tmp_path):
    plant(tmp_path)
    (tmp_path / "jpaged/bench").mkdir()
    for name, text in {"__init__": room("a", "cli"), "a": "import jpaged.bench.cli\n", "cli": ""}.items():
        (tmp_path / f"jpaged/bench/{name}.py").write_text(text)
    assert house_rules.violations(tmp_path) == ["jpaged/bench/a.py:1: jpaged.bench may not import its command"]


def test_a_folder_that_is_too_full_is_found(tmp_path):
    plant(tmp_path)
    for number in range(26):
        (tmp_path / f"tests/b{number}.py").write_text("")
    assert house_rules.violations(tmp_path) == ["tests: 27 files, over the limit of 25"]


def test_a_house_in_order_is_passed(tmp_path):
    plant(tmp_path)
    assert house_rules.violations(tmp_path) == []


def test_nested_functions_and_docstrings_do_not_lengthen_a_function():
    text = 'def f():\n    """A.\n\n    B.\n    """\n    def g():\n        return 1\n    return g\n'
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert house_rules.own_lines(function) == 2


def room(*names: str) -> str:
    """A package's docstring that lists these files."""
    return "\n".join(['"""A room.', "", *(f"{name}.py  what it is" for name in names), '"""', ""])


def plant(root: Path) -> None:
    files = {
        "jpaged/__init__.py": "def __getattr__(name):\n    from jpaged import types\n    return types\n",
        "jpaged/types/__init__.py": room("values"),
        "jpaged/types/values.py": "",
        "jpaged/config/__init__.py": room("engine_config"),
        "jpaged/config/engine_config.py": "import os\nimport jpaged.types\nx = os.environ\n",
        "jpaged/device/__init__.py": room("step"),
        "jpaged/device/step.py": "import jax\nfrom jpaged.engine.executor.verbs import Executor\n",
        "jpaged/engine/__init__.py": room("a", "scheduler"),
        "jpaged/engine/executor/__init__.py": room("verbs"),
        "jpaged/engine/executor/verbs.py": COUNTER,
        "jpaged/engine/scheduler.py": "import jpaged.engine.a\nfrom jpaged.types import Request\n",
        "jpaged/engine/a.py": "def f(x):\n    assert isinstance(x.y, int)\n    assert x is not None\n",
        "jpaged/cli/__init__.py": room("a"),
        "jpaged/cli/a.py": "",
        "jpaged/client/__init__.py": room("a"),
        "jpaged/client/a.py": "import grpc\n",
        "jpaged/kernels/__init__.py": room("a", "api"),
        "jpaged/kernels/a.py": "",
        "jpaged/kernels/api.py": "x = 1\n" * 800,
        "jpaged/models/__init__.py": room("a"),
        "jpaged/models/a.py": "",
        "jpaged/server/__init__.py": room("a"),
        "jpaged/server/a.py": "",
        "jpaged/_proto/__init__.py": "",
        "jpaged/_proto/v1/__init__.py": "",
        "jpaged/_proto/v1/x_pb2_grpc.py": "import grpc\n" * 600,
        "tests/test_a.py": f"import os\nimport pytest\npytest.importorskip('torch')\ndef test_a({NINE}): os.environ\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
