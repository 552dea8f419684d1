"""What mkdocs is told of the pages that are not in docs/: the README, the changelog, references, linked files."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import links, references, tables

_SOURCES: dict[str, str] = {}
"""The path in the repository of each page that was written by hand."""
_BOOSTS = {
    **dict.fromkeys(("from_vllm.md", "tpus.md", "gpus.md", "memory.md", "models.md", "sampling.md"), 2.0),
    **dict.fromkeys(("changelog.md", "performance.md", "planted_faults.md", "changing.md", "architecture.md"), 0.5),
}
"""Factors of pages in the order of search results: pages for a task come before records and pages for developers."""
_TITLE_BOOST = 10.0
"""Weight of a word in a heading. With the theme's 1000 a page with one word of a flag in a heading would come first."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put documents that have no place in the order behind those that have one."""
    rest = links.unlisted((links.ROOT / "mkdocs.yml").read_text())
    if rest and config.nav is not None:
        config.nav = [*config.nav, {"More": rest}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/: documents and files that pages link to, and the pages that are generated."""
    for path, text in references.pages().items():
        files.append(File.generated(config, path, content=text))
    waiting = [*links.PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        file, place = links.ROOT / source, links.site_path(source)
        if not file.is_file():  # a generated page
            continue
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(file)))
        if source.endswith(".md"):
            _SOURCES[place] = source
            new = set(links.linked(file.read_text(), source)) - seen
            waiting, seen = [*waiting, *new], seen | new
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links of the site, and set the page's rank in the search."""
    if (boost := _BOOSTS.get(page.file.src_uri)) is not None:
        page.meta["search"] = {"boost": boost}
    source = _SOURCES.get(page.file.src_uri)
    return markdown if source is None else links.rewritten(markdown, source)


def on_page_content(html: str, **_: Any) -> str:
    """Mark tables that are too wide for phones."""
    return tables.mark_tables(html)


def on_post_build(config: MkDocsConfig) -> None:
    """Set the weight of headings in the search index."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["config"]["fields"]["title"]["boost"] = _TITLE_BOOST
    path.write_text(json.dumps(index), encoding="utf-8")
