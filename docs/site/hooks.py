"""What mkdocs is told of the pages that are not in docs/: the README, the changelog, references, linked files."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import links, references

_SOURCES: dict[str, str] = {}
"""The path in the repository of each page that was written by hand."""


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
    """Turn links between files of the repository into links of the site."""
    source = _SOURCES.get(page.file.src_uri)
    return markdown if source is None else links.rewritten(markdown, source)
