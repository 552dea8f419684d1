"""The pages that the documentation site is made of, before a site is made of them."""

import re
import shlex
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from docs.site import links, references, tables, vllm_fields, vllm_flags, vllm_names
from jpaged.access.authenticator import HTTP
from jpaged.cli.main import COMMANDS
from jpaged.cli.options import to_flag
from jpaged.config import ENVIRONMENT, EngineConfig, iter_options, platform_default
from jpaged.http.app import INSTEAD
from jpaged.server_load import DISTRIBUTIONS, get_metrics
from protos.generate import PROTOS
from protos.lint import compile_protos
from protos.reference import page_of, reference
from tests.deploy.metrics import scrape
from tests.deploy.servers import parse


@pytest.fixture(scope="module")
def descriptors() -> FileDescriptorSet:
    return compile_protos(PROTOS)


def test_every_option_and_variable_is_on_its_page():
    page = "\n".join(references.options())
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert rows == {to_flag(name) for name, _, _ in iter_options()} | ENVIRONMENT.keys()
    assert "| `--port` | default: 50051, from 0, to 65535 | port to listen on; 0 picks a free one |" in page


def test_every_command_is_on_its_page():
    page = "\n".join(references.commands())
    told = re.findall(r"^## jpaged ([a-z ]+)$", page, re.MULTILINE)
    assert [name for name in told if " " not in name] == list(COMMANDS)
    assert "bench serve" in told
    assert "--request-rate" in page
    assert "--max-model-len N" not in page  # it is on the page of options


def test_the_page_of_vllm_has_the_tables_of_its_flags():
    assert vllm_flags.PAGE.read_text() == vllm_flags.page(), "python -m docs.site.vllm_flags writes it"
    assert "| `--gpu-memory-utilization`, `--device-memory-utilization` | `--memory-utilization` |" in vllm_flags.page()


def test_the_page_of_http_has_the_table_of_vllms_fields():
    assert vllm_fields.PAGE.read_text() == vllm_fields.page(), "python -m docs.site.vllm_fields writes it"
    policies = [vllm_fields.policy(path, name) for path, some in vllm_fields.FIELDS.items() for name in some.split()]
    assert all(policies) and {"yes", "no effect", "refused", "only `false`"} <= set(policies)


def test_the_page_of_messages_has_the_table_of_anthropics_fields():
    page = vllm_fields.ANTHROPIC_PAGE
    assert page.read_text() == vllm_fields.page(page), "python -m docs.site.vllm_fields writes it"
    places = {place: names.split() for place, names in vllm_fields.ANTHROPIC.items()}
    policies = {vllm_fields.anthropic_policy(place, name) for place, names in places.items() for name in names}
    assert {"yes", "no effect", "refused", "only `[]`"} <= policies
    assert vllm_fields.anthropic_policy("blocks", "container_upload") == "refused"


async def test_the_page_of_vllm_has_the_tables_of_its_paths_and_metrics():
    scraped = await scrape()
    assert vllm_names.PAGE.read_text() == vllm_names.page(scraped), "python -m docs.site.vllm_names writes it"
    names = vllm_names.exported(scraped)
    explained = {f"vllm:{name}" for group in vllm_names.OURS for name in group.split()}
    assert {f"vllm:{name}" for name in vllm_names.METRICS.split()} - names - explained == set()
    instead = re.findall(r"`((?:vllm|jpaged):[a-z_]+\b)`", " ".join(vllm_names.OURS.values()))
    assert set(instead) - names == set()
    explained = {path for group in INSTEAD for path in group.split()}
    served = {path.replace(":path", "") for _, path in HTTP}
    assert set(vllm_names.PATHS.split()) - served - explained == set()
    assert explained & served == set()


def test_the_defaults_that_differ_are_the_options():
    page = vllm_flags.PAGE.read_text()
    config = EngineConfig()
    assert f"`--max-num-queued-reqs {config.scheduler.max_num_queued_reqs}`" in page
    assert f"`--max-loras {config.lora.max_loras}`" in page
    assert f"waits {config.server.shutdown_timeout:g} s for running requests" in page
    assert f"| {config.cache.swap_space:g} GiB of host memory |" in page
    shares = {platform: platform_default("memory_utilization", platform) for platform in ("tpu", "gpu", "cpu")}
    assert f"{shares['tpu']} on TPUs, {shares['gpu']} on GPUs, {shares['cpu']} on CPUs" in page
    sizes = [platform_default("block_size", platform) for platform in ("cpu", "gpu", "tpu")]
    assert "{} on CPUs, {} on GPUs, {} or 128 on TPUs".format(*sizes) in page


@pytest.mark.parametrize("name", ["README.md", "docs/memory.md", "docs/tpus.md", "docs/gpus.md", "docs/lora.md"])
def test_the_commands_of_a_page_are_accepted(name):
    text = (links.ROOT / name).read_text()
    blocks = "\n".join(re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    commands = re.findall(r"\bjpaged (?:serve|plan|doctor|health|bench) [^#>&\n]*", blocks)
    assert commands
    for command in commands:
        # Names in capitals are the reader's; a shell variable is a number of a process, or an address.
        words = [re.sub(r"^\\?\$id$", "0", word) for word in shlex.split(command)]
        parse([word.replace("$HOST0", "10.0.0.2") for word in words])


def test_the_first_page_starts_with_an_installation_and_one_command_and_links_the_questions():
    text = (links.ROOT / "README.md").read_text()
    assert re.search(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1] == "pip install jpaged\njpaged serve demo\n"  # type: ignore[index]
    first = text[: text.index("## Use it")]
    nav = (links.ROOT / "mkdocs.yml").read_text()
    for name in ("tpus.md", "memory.md", "sampling.md", "from_vllm.md", "models.md", "gpus.md"):
        assert f"(docs/{name})" in first
        assert f": {name}\n" in nav


def test_tables_that_are_too_wide_for_phones_are_marked_and_labeled():
    row = "<tr>\n<td>{}</td>\n<td>b</td>\n<td style='text-align: right;'>3 &lt; 4</td>\n</tr>"
    head = "<tr><th>name</th><th></th><th>a <code>value</code></th></tr>"
    narrow = f"<table>{head}{row.format('a')}</table>"
    assert tables.mark_tables(narrow) == narrow
    wide = tables.mark_tables(f"<p>x</p><table>{head}{row.format('a' * 40)}</table>")
    assert wide.startswith("<p>x</p><table data-stacked>")
    assert "<td style='text-align: right;' data-label=\"a value\">3 &lt; 4</td>" in wide
    assert "<td>b</td>" in wide  # its column has no name
    spanned = f"<table>{head}{row.format('a' * 40)}<tr><td colspan='3'>all</td></tr></table>"
    assert tables.mark_tables(spanned) == spanned


async def test_every_metric_is_on_its_page():
    page = "\n".join(references.metrics(await scrape()))
    rows = dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", page, re.MULTILINE))
    assert {metric.name for _, metric in get_metrics("gauge")} <= rows.keys()
    assert {f"{metric.name}_total" for _, metric in get_metrics("counter")} <= rows.keys()
    assert {one.metric.name for one in DISTRIBUTIONS.values()} <= rows.keys()
    assert rows["vllm:num_requests_running"] == "gauge"
    assert rows["vllm:spec_decode_num_drafts_total"] == "counter"


def test_every_call_message_field_and_value_of_the_protos_is_on_a_page(descriptors):
    pages = reference(descriptors)
    assert pages.keys() == {file.name for file in descriptors.file}
    for file in descriptors.file:
        page = pages[file.name]
        for service in file.service:
            for method in service.method:
                assert f"**{method.name}**(" in page
        for message in file.message_type:
            assert f"## {message.name} {{#{message.name.lower()}}}" in page
            for field in message.field:
                assert f"- `{field.name}` = {field.number}, " in page
        for enum in file.enum_type:
            for value in enum.value:
                assert f"- `{value.name}` = {value.number}" in page


def test_a_page_of_a_proto_links_types_and_keeps_what_is_laid_out(descriptors):
    page = reference(descriptors)["jpaged/v1/inference.proto"]
    assert "- `sampling` = 5, [SamplingParams](jpaged.v1.inference.md#samplingparams)" in page
    assert "**Generate**([GenerateRequest](jpaged.v1.inference.md#generaterequest)) returns (stream " in page
    assert "```text\n  INVALID_ARGUMENT    a field is wrong" in page
    assert page.count("```") % 2 == 0
    assert page_of("jpaged/v1/inference.proto") == "jpaged.v1.inference.md"


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](docs/sampling.md#scores)", "[a](sampling.md#scores)"),
        ("README.md", "![a](docs/demo.svg)", "![a](demo.svg)"),
        ("README.md", "[a](deploy) b", "a b"),
        ("README.md", "[a](pyproject.toml)", "[a](repository/pyproject.toml)"),
        ("docs/runbook.md", "[a](tools.md)", "[a](tools.md)"),
        ("docs/runbook.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/runbook.md", "[a](#here), [b](https://x.org/y)", "[a](#here), [b](https://x.org/y)"),
        ("docs/runbook.md", "[a](../nowhere.json)", "[a](../nowhere.json)"),
        ("docs/runbook.md", "```\n[a](../README.md)\n```\n", "```\n[a](../README.md)\n```\n"),
        ("benchmarks/results/peers.md", "[a](../../docs/performance.md)", "[a](../../../performance.md)"),
    ],
)
def test_links_between_files_become_links_of_the_site(source, text, expected):
    assert links.rewritten(text, source) == expected


def test_every_link_of_a_document_leads_to_a_file_or_a_folder():
    documents = [links.ROOT / "README.md", links.ROOT / "CHANGELOG.md", *sorted((links.ROOT / "docs").glob("*.md"))]
    dead = []
    for document in documents:
        source = document.relative_to(links.ROOT).as_posix()
        for target in re.findall(r"\]\(([^()\s#]+)[^()\s]*\)", document.read_text()):
            is_elsewhere = re.match(r"[a-z]+:|reference/", target)  # pages of references are generated
            if not is_elsewhere and not (document.parent / target).exists():
                dead.append(f"{source}: {target}")
    assert dead == []


def test_the_sites_order_names_pages_that_are_there_and_the_rest_comes_behind_it():
    config = (links.ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": ([\w./-]+\.md)$", config, re.MULTILINE)
    documents = {path.name for path in Path(links.ROOT / "docs").glob("*.md")}
    generated = {"reference/commands.md", "reference/options.md", "reference/metrics.md", "reference/protocol.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) <= documents | set(links.PAGES.values()) | generated
    assert links.unlisted(config) == sorted(documents - set(listed))
    assert links.unlisted(config.replace(": sampling.md", ": x.md")) == sorted(
        documents - set(listed) | {"sampling.md"}
    )
