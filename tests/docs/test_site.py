"""The documentation site as `make docs` builds it: whole, and with nothing from elsewhere."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page.chromium import browsing
from docs.site.links import ROOT

pytestmark = pytest.mark.long
TOOLS = Path(sys.prefix) / "docs"
"""What `make test-long` installs of the extra `docs`."""
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
_NO_LOADS = {"canonical", "next", "prev", "alternate"}


def build(folder: Path, site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """mkdocs over a folder like this repository, every warning an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site), *words]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, folder, "--quiet")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Loads(HTMLParser):
    """What a page loads by itself, and what its styles name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._is_style = tag == "style"
        if not (tag == "link" and set((values.get("rel") or "").split()) & _NO_LOADS):
            self.found.append(values.get(_LOADS.get(tag, "")) or "")
        self.found += re.findall(r"url\(\s*['\"]?([^'\")]+)", values.get("style") or "")

    def handle_data(self, data):
        if self._is_style:
            self.found += re.findall(r"(?:url\(\s*|@import\s+)['\"]?([^'\")]+)", data)


def test_no_page_loads_anything_from_another_host(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    loaded = {(page.name, link) for page in pages for link in Loads(page.read_text()).found if link}
    assert any(link.endswith(".css") for _, link in loaded)
    assert [pair for pair in sorted(loaded) if _ELSEWHERE.match(pair[1])] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    named = re.findall(r"(?:url\(\s*|@import\s+)['\"]?([^'\")]{1,200})", styles)
    assert [link for link in named if _ELSEWHERE.match(link)] == []
    # The theme's script fetches a library for diagrams where a page has one.
    assert [page.name for page in pages if 'class="mermaid"' in page.read_text()] == []


def test_a_page_that_does_load_is_noticed():
    planted = '<link rel="stylesheet" href="//fonts.example/x"><style>@import "https://a.example"</style>'
    found = [link for link in Loads(planted).found if _ELSEWHERE.match(link)]
    assert found == ["//fonts.example/x", "https://a.example"]


def test_documents_and_references_are_pages_with_what_they_are_about(site):
    for name, text in {
        "index.html": "Use it",
        "tutorial.html": "jpaged serve",
        "changelog.html": "Unreleased",
        "reference/options.html": "--max-model-len",
        "reference/metrics.html": "vllm:num_requests_running",
        "reference/commands.html": "jpaged bench serve",
        "reference/jpaged.v1.inference.html": "GenerateRequest",
    }.items():
        assert text in (site / name).read_text(), name


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address of a web server of a folder."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# Query -> a page that is among the first results, and how far down.
SEARCHES = {
    "TPU pod": ("tpus.html", 1),
    "GKE": ("tpus.html", 1),
    "KV memory": ("memory.html", 1),
    "gpu-memory-utilization": ("memory.html", 1),
    "--gpu-memory-utilization": ("from_vllm.html", 3),
    "gpu_memory_utilization": ("memory.html", 1),
    "sampling fields": ("sampling.html", 1),
    "max_tokens": ("sampling.html", 1),
    "from vLLM": ("from_vllm.html", 1),
    "vllm:num_requests_running": ("from_vllm.html", 1),
    "add a family": ("models.html", 1),
}


async def test_the_search_finds_the_pages_of_questions_and_of_vllms_names(site):
    found = {}
    with served(site) as address:
        async with browsing() as browser:
            await browser.go(f"{address}/index.html")
            await browser.until("!!document.querySelector('[data-md-component=search-query]')")
            await browser.value("document.querySelector('#__search').checked = true")
            for query in SEARCHES:
                for text in ("", query):  # the search starts when the text changes
                    await browser.value(
                        "(() => { const input = document.querySelector('[data-md-component=search-query]');"
                        f" input.focus(); input.value = {json.dumps(text)};"
                        " input.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
                    )
                    links = "[...document.querySelectorAll('.md-search-result__item > a:first-child')]"
                    await browser.until(f"{links}.length > 0 === {json.dumps(bool(text))}")
                found[query] = await browser.value(f"{links}.map((one) => new URL(one.href).pathname.slice(1))")
            assert browser.problems == []
    assert {query: found[query] for query, (page, last) in SEARCHES.items() if page not in found[query][:last]} == {}


async def test_tables_fit_a_phone(site):
    wide = (
        "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText.slice(0, 200))"
    )
    pages = ("index.html", "from_vllm.html", "tpus.html", "memory.html", "http.html", "reference/options.html")
    with served(site) as address:
        async with browsing() as browser:
            await browser.resize(390, 844, is_phone=True)
            for page in pages:
                await browser.go(f"{address}/{page}")
                await browser.until(
                    f"location.pathname === '/{page}' && document.readyState === 'complete'"
                    " && !!document.querySelector('.md-typeset__scrollwrap')"
                )
                assert await browser.value(wide) == [], page
                assert await browser.value("document.documentElement.scrollWidth") == 390, page


def test_a_dead_link_ends_the_build(tmp_path):
    planted = tmp_path / "repository"
    (planted / "docs").mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in ("docs", "build"):
            (planted / path.name).symlink_to(path)
    for path in (ROOT / "docs").iterdir():
        if path.name != "tools.md":
            (planted / "docs" / path.name).symlink_to(path)
    (planted / "docs" / "tools.md").write_text("# Tools\n\n[dead](nowhere.md) and [gone](sampling.md#no-such-part)\n")
    done = build(planted, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "no-such-part" in done.stderr
