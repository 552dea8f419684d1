"""/v1/files and /v1/batches with the real openai client: from the upload to the results, whatever comes between."""

import asyncio
import contextlib
import errno
import gzip
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from jpaged.access.keys import ApiKey, Role
from jpaged.errors import InvalidArgument, QueueFull, StorageError
from jpaged.http.batches import job as lines_of_batches
from jpaged.http.batches import routes as files_of_batches
from jpaged.http.batches import store as stores
from jpaged.http.batches.job import PRIORITY, BatchJob, Outputs
from jpaged.http.batches.routes import _Uploads
from jpaged.http.batches.store import Batch, Store
from tests.server.harness import Harness, eventually, running

ENDED = {"completed", "failed", "expired", "cancelled"}


def openai_of(harness: Harness, tenant: str | None = None) -> openai.AsyncOpenAI:
    headers = {"x-jpaged-tenant": tenant} if tenant else None
    return openai.AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0, default_headers=headers)


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[Harness, openai.AsyncOpenAI]]:
    async with running(http_port=0, batch_dir=str(folder), **options) as harness, openai_of(harness) as client:
        yield harness, client


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"model": "fake", "prompt": f"of {custom_id}", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or given}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def send(client: openai.AsyncOpenAI, content: bytes, **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    options = {"endpoint": "/v1/completions", "completion_window": "24h", **options}
    return await client.batches.create(input_file_id=file.id, **options)


async def once(client: openai.AsyncOpenAI, batch_id: str, is_there: Callable[[Any], bool]) -> Any:
    """Waits until a batch is as it is to be."""
    async with asyncio.timeout(300):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if is_there(batch):
                return batch
            await asyncio.sleep(0.02)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    return await once(client, batch_id, lambda batch: batch.status in ENDED)


async def at(client: openai.AsyncOpenAI, batch_id: str, status: str, completed: int = 0) -> Any:
    """Waits until a batch is in a status, with so many lines done."""

    def is_there(batch: Any) -> bool:
        assert batch.status not in ENDED - {status}, batch
        return bool(batch.status == status and batch.request_counts.completed >= completed)

    return await once(client, batch_id, is_there)


async def results(client: openai.AsyncOpenAI, file_id: str) -> dict[str, dict[str, Any]]:
    content = await client.files.content(file_id)
    return {one["custom_id"]: one for one in map(json.loads, content.text.splitlines())}


async def test_a_batch_is_answered_as_its_requests_would_be(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        lines = [line(f"r{i}") for i in range(20)]
        batch = await send(client, jsonl(lines), metadata={"job": "nightly"})
        assert batch.status in ("validating", "in_progress") and batch.metadata == {"job": "nightly"}
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.error_file_id is None and batch.model == "fake"
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
        found = await results(client, batch.output_file_id)
        assert found.keys() == {one["custom_id"] for one in lines}
        alone = await client.post("/completions", body=lines[7]["body"], cast_to=openai.types.Completion)
        told = found["r7"]["response"]
        assert told["status_code"] == 200 and told["body"]["choices"][0]["text"] == alone.choices[0].text
        assert told["body"]["object"] == "text_completion" and found["r7"]["error"] is None
        output = await client.files.retrieve(batch.output_file_id)
        assert output.purpose == "batch_output" and output.bytes == len((await client.files.content(output.id)).content)


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}, "chat.completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        ("/v1/score", {"prompt": "a", "continuations": ["b"]}, "list"),
    ],
)
async def test_every_endpoint_has_batches(tmp_path: Path, url: str, body: dict[str, Any], kind: str) -> None:
    async with serving(tmp_path) as (_, client):
        batch = await send(client, jsonl([line("one", url, **body)]), endpoint=url)
        batch = await ended(client, batch.id)
        found = await results(client, batch.output_file_id)
        assert found["one"]["response"]["body"]["object"] == kind


async def test_lines_that_cannot_be_honoured_fail_by_themselves(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        wrong = line("wrong", prompt="a", temperature=-1)
        other = line("other", prompt="a", model="another")
        long = line("long", prompt="a" * 500)
        batch = await ended(client, (await send(client, jsonl([line("good"), wrong, long, other]))).id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
        failed = await results(client, batch.error_file_id)
        assert failed["wrong"]["error"] is None and failed["wrong"]["response"]["status_code"] == 400
        told = failed["wrong"]["response"]["body"]["error"]
        assert (told["code"], told["param"]) == ("INVALID_ARGUMENT", "temperature")
        told = failed["long"]["response"]["body"]["error"]
        assert (told["code"], told["param"]) == ("context_length_exceeded", "prompt")
        assert failed["other"]["response"]["status_code"] == 404
        assert failed["other"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert (await results(client, batch.output_file_id)).keys() == {"good"}


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"nonsense\n", "invalid_line", 1),
        (jsonl([line("a")]) + b"\xff\n", "invalid_line", 2),
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (jsonl([line("a"), line("b", "/v1/embeddings", input="x")]), "mismatched_url", 2),
        (jsonl([line("a" * 513)]), "invalid_custom_id", 1),
        (jsonl([line(str(i)) for i in range(9)]), "too_many_lines", None),
        (jsonl([line("a"), line("b", prompt="x" * (1 << 17))]), "invalid_line", 2),
    ],
)
async def test_an_input_that_is_no_list_of_requests_fails_as_a_whole(
    tmp_path: Path, content: bytes, code: str, number: int | None
) -> None:
    async with serving(tmp_path, max_batch_lines=8, max_request_size=0.0625) as (harness, client):
        batch = await ended(client, (await send(client, content)).id)
        assert batch.status == "failed" and batch.output_file_id is None
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
        assert harness.num_open_calls == 0


async def test_a_batch_whose_outputs_cannot_be_stored_fails_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add_output(*_: Any) -> None:
        raise StorageError("an output: the disk is gone")

    monkeypatch.setattr(Store, "add_output", add_output)
    async with serving(tmp_path) as (_, client):
        batch = await ended(client, (await send(client, jsonl([line("a")]))).id)
        assert batch.status == "failed" and batch.output_file_id is None
        assert batch.errors.data[0].code == "storage"
        assert "the outputs of batch" in caplog.text


@pytest.mark.long
async def test_a_server_that_starts_again_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    lines = [line(f"r{i}") for i in range(40)]
    async with serving(tmp_path, shutdown_timeout=0) as (harness, client):
        harness.faults.hold_after(12)
        batch = await send(client, jsonl(lines))
        before = await at(client, batch.id, "in_progress", completed=1)
        assert before.request_counts.completed < 40
    done_before = _lines_on_disk(tmp_path)
    assert done_before
    async with serving(tmp_path) as (harness, client):
        after = await ended(client, batch.id)
        assert after.status == "completed" and after.request_counts.completed == 40
        found = await results(client, after.output_file_id)
        assert len(found) == 40 == len((await client.files.content(after.output_file_id)).text.splitlines())
        for one in done_before:  # what was answered is not run again: its request id is the same
            assert found[one["custom_id"]] == one
        file = await client.files.retrieve(after.input_file_id)
        assert file.filename == "in.jsonl"


def _lines_on_disk(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(one) for path in folder.rglob("*.jsonl") for one in path.read_text().splitlines()]
    return [one for one in found if "response" in one]


def _tear(folder: Path) -> None:
    (output,) = (path for path in folder.rglob("*.jsonl") if b'"response"' in path.read_bytes())
    output.write_bytes(output.read_bytes()[:-7])


def _names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


async def test_a_torn_line_is_run_again(tmp_path: Path) -> None:
    async with serving(tmp_path, shutdown_timeout=0) as (harness, client):
        harness.faults.hold_after(12)
        batch = await send(client, jsonl([line(f"r{i}") for i in range(20)]))
        await at(client, batch.id, "in_progress", completed=1)
    _tear(tmp_path)
    async with serving(tmp_path) as (_, client):
        after = await ended(client, batch.id)
        assert after.request_counts.completed == 20
        assert len(await results(client, after.output_file_id)) == 20


async def test_a_line_that_is_written_while_a_batch_is_cancelled_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel_with_a_write_pending(job: BatchJob, outputs: Outputs) -> str:
        await job._enter("cancelling")
        may_write = threading.Event()

        def write() -> None:
            assert may_write.wait(300)
            outputs.add_answer("r0", json.dumps({"custom_id": "r0"}) + "\n")

        job._threads._writer.submit(write)
        asyncio.get_running_loop().call_soon(may_write.set)
        return "cancelled"

    monkeypatch.setattr(BatchJob, "_run_lines", cancel_with_a_write_pending)
    async with serving(tmp_path) as (_, client):
        batch = await ended(client, (await send(client, jsonl([line("r0")]))).id)
        assert batch.status == "cancelled" and batch.request_counts.completed == 1
        assert [*await results(client, batch.output_file_id)] == ["r0"]


async def test_a_batch_is_cancelled_and_keeps_what_was_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as (harness, client):
        harness.faults.hold_after(12)
        batch = await send(client, jsonl([line(f"r{i}") for i in range(40)]))
        await at(client, batch.id, "in_progress", completed=1)
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
        assert len(await results(client, batch.output_file_id)) == batch.request_counts.completed < 40
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)
        harness.faults.release()


async def test_a_batch_that_waits_for_another_of_its_tenant_is_cancelled_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (harness, client):
        harness.faults.gate.clear()
        first = await send(client, jsonl([line("a")]))
        await at(client, first.id, "in_progress")
        second = await send(client, jsonl([line("b")]))
        assert (await client.batches.cancel(second.id)).status == "cancelling"
        harness.faults.release()
        assert (await ended(client, first.id)).status == "completed"
        assert (await ended(client, second.id)).status == "cancelled"


async def test_what_is_not_done_when_the_window_is_over_has_expired(tmp_path: Path) -> None:
    async with serving(tmp_path) as (harness, client):
        harness.faults.gate.clear()
        batch = await ended(client, (await send(client, jsonl([line("a"), line("b")]), completion_window="1s")).id)
        assert batch.status == "expired" and batch.output_file_id is None
        failed = await results(client, batch.error_file_id)
        assert {one["error"]["code"] for one in failed.values()} == {"batch_expired"} and len(failed) == 2
        harness.faults.release()


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        made = [(await send(client, jsonl([line("a")]))).id for _ in range(5)]
        listed = [one.id async for one in await client.batches.list(limit=2)]
        assert listed == made[::-1]
        page = await client.batches.list(limit=3)
        assert page.has_more and [one.id for one in page.data] == made[:1:-1]
        for batch_id in made:
            await ended(client, batch_id)
        inputs = [one async for one in await client.files.list(purpose="batch", limit=2, order="asc")]
        assert [one.purpose for one in inputs] == ["batch"] * 5
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(limit=0)
        with pytest.raises(openai.NotFoundError):
            await client.batches.list(after="batch_none")


async def test_files_are_deleted_unless_a_batch_reads_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (harness, client):
        harness.faults.gate.clear()
        batch = await send(client, jsonl([line("a")]))
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        harness.faults.release()
        batch = await ended(client, batch.id)
        for file_id in (batch.input_file_id, batch.output_file_id):
            assert (await client.files.delete(file_id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.content(file_id)
        assert not _names(tmp_path, "*/files/*")


async def test_tenants_see_their_own_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as (harness, client), openai_of(harness, "another") as other:
        batch = await ended(client, (await send(client, jsonl([line("a")]))).id)
        assert [one.id async for one in await other.batches.list()] == []
        assert [one.id async for one in await other.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await other.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.files.content(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )


async def test_names_that_callers_give_are_never_paths(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    async with serving(folder) as (harness, client):
        name = "../../outside.jsonl"
        file = await client.files.create(file=(name, jsonl([line("a")])), purpose="batch")
        assert _names(tmp_path, "*") == ["batches"]
        assert (await client.files.retrieve(file.id)).id == file.id
        async with httpx2.AsyncClient(base_url=harness.http_url) as plain:
            for given in ("..%2Fowner", "%2e%2e%2fowner.json", "file-0%00"):
                assert (await plain.get(f"/v1/files/{given}")).status_code == 404
                assert (await plain.get(f"/v1/files/{given}/content")).status_code == 404
                assert (await plain.get(f"/v1/batches/{given}")).status_code == 404


async def test_files_have_bounds(tmp_path: Path) -> None:
    bounds = {"max_batch_file_size": 0.0625, "max_batch_storage": 0.001, "tenant_batch_share": 1.0}
    async with serving(tmp_path, **bounds) as (harness, client):
        with pytest.raises(openai.APIStatusError) as large:
            await client.files.create(file=("in.jsonl", b"x" * (1 << 17)), purpose="batch")
        assert large.value.code == "REQUEST_TOO_LONG"
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
        for _ in range(17):
            await client.files.create(file=("in.jsonl", b"x" * 63000), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="max_batch_storage") as full:
            await client.files.create(file=("in.jsonl", b"x" * 63000), purpose="batch")
        assert (full.value.status_code, full.value.response.headers["x-should-retry"]) == (507, "false")
        async with httpx2.AsyncClient(base_url=harness.http_url) as plain:
            for content, kind in (
                (b"x", "text/plain"),
                (b"x", "multipart/form-data"),
                (b"x", "multipart/form-data; boundary=b"),
            ):
                refused = await plain.post("/v1/files", content=content, headers={"content-type": kind})
                assert refused.status_code == 400, refused.text
            endless = await plain.post(
                "/v1/files", content=_endless(), headers={"content-type": "multipart/form-data; boundary=b"}
            )
            assert endless.json()["error"]["code"] == "REQUEST_TOO_LONG"


async def test_a_file_that_gzip_compressed_is_kept_as_its_lines(tmp_path: Path) -> None:
    lines = jsonl([line("a"), line("b")])
    async with serving(tmp_path, max_batch_file_size=0.0625) as (_, client):
        batch = await send(client, lines)
        parts = gzip.compress(lines[:50]) + gzip.compress(lines[50:])
        file = await client.files.create(file=("in.jsonl.gz", parts), purpose="batch")
        assert (file.filename, file.bytes) == ("in.jsonl", len(lines))
        assert (await client.files.content(file.id)).content == lines
        packed = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        for one in (batch, packed):
            ended = await once(client, one.id, lambda found: found.status in ENDED)
            assert (ended.status, ended.request_counts.completed) == ("completed", 2)
        kept = _names(tmp_path, "*/files/*")
        whole = gzip.compress(lines)
        for damaged in (whole[:-9], whole[:20] + b"\xff" + whole[21:], whole[:-8] + b"x" * 8, b"\x1f\x8b"):
            with pytest.raises(openai.BadRequestError, match="cannot be decompressed") as refused:
                await client.files.create(file=("in.jsonl.gz", damaged), purpose="batch")
            assert refused.value.param == "body.file"
        with pytest.raises(openai.APIStatusError, match="decompressed lines are over the limit of 65536") as large:
            await client.files.create(file=("in.jsonl.gz", gzip.compress(bytes(1 << 24))), purpose="batch")
        assert (large.value.status_code, large.value.code) == (413, "REQUEST_TOO_LONG")
        assert _names(tmp_path, "*/files/*") == kept


async def _endless() -> AsyncIterator[bytes]:
    yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    for _ in range(64):
        yield b"x" * (1 << 16)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
async def test_what_no_batch_can_be_made_of_says_why(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with serving(tmp_path) as (harness, client), httpx2.AsyncClient(base_url=harness.http_url) as plain:
        file = await client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        refused = await plain.post("/v1/batches", json={**good, **body})
        assert refused.status_code == 400 and param in refused.json()["error"]["param"]


async def test_without_a_folder_the_paths_say_what_is_missing() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for path in ("/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/batch_1"):
            answer = await client.get(path)
            assert answer.status_code == 501 and "--batch-dir" in answer.json()["error"]["message"]
        assert (await client.post("/v1/batches/batch_1/cancel")).status_code == 501


async def test_one_server_has_the_folder_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with pytest.raises(InvalidArgument, match=r"batch_dir: .* is used by another server"):
            async with serving(tmp_path):
                pass
    async with serving(tmp_path) as (_, client):
        assert (await ended(client, (await send(client, jsonl([line("a")]))).id)).status == "completed"


def _priorities(harness: Harness) -> list[int]:
    samplings = [one.record.sampling for one in harness.server._service._open.values()]
    return sorted(one.priority for one in samplings if one is not None)


@pytest.mark.long
async def test_lines_leave_rows_to_callers_and_rank_behind_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (harness, client):
        harness.faults.gate.clear()
        batch = await send(client, jsonl([line(f"r{i}") for i in range(40)]))
        await at(client, batch.id, "in_progress")
        await eventually(lambda: harness.num_open_calls == 6)  # of eight rows: two are kept
        mine = asyncio.create_task(client.completions.create(model="fake", prompt="me", max_tokens=2))
        await eventually(lambda: _priorities(harness) == [0, *[PRIORITY] * 6])
        harness.faults.release()
        assert (await mine).choices[0].finish_reason in ("stop", "length")
        assert (await ended(client, batch.id)).request_counts.completed == 40


def test_the_lines_of_a_batch_have_the_permissions_of_the_key_that_created_it():
    assert batch_of("acme", "a", key_id="k1", role="inference").key == ApiKey("k1", "acme", Role.INFERENCE)
    assert batch_of("acme", "a").key is None


def batch_of(owner: str, batch_id: str, **fields: Any) -> Batch:
    known: dict[str, Any] = {
        "tenant": owner,
        "endpoint": "/v1/completions",
        "input_id": f"file-{batch_id}-in",
        "output_id": f"file-{batch_id}-out",
        "error_id": f"file-{batch_id}-err",
        "completion_window": "24h",
        "created_at": 1,
        "expires_at": 2,
    }
    return Batch(id=batch_id, owner=owner, **{**known, **fields})


class Full:
    """A disk whose files take so many bytes more, and then none, unless the reserve is freed."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, *, has_reserve: bool = True
    ) -> None:
        self.num_left = num_bytes
        write = stores._write

        def write_state(path: Path, value: Any) -> None:
            if self.num_left <= 0 and (has_reserve is False or (root / "reserve").exists()):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, value)

        class File(io.FileIO):
            def write(_, data: Any) -> int:
                num = min(len(data), max(0, self.num_left))
                self.num_left -= len(data)
                if not num:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data[:num])

        monkeypatch.setattr(stores, "_write", write_state)
        monkeypatch.setattr(lines_of_batches, "_opened", lambda path: File(path, "ab"))


async def test_a_full_disk_ends_a_batch_with_the_lines_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (_, client):
        disk = Full(tmp_path, monkeypatch, 2000)
        batch = await ended(client, (await send(client, jsonl([line(f"r{i}") for i in range(60)]))).id)
        assert batch.status == "failed"
        assert [one.code for one in batch.errors.data] == ["storage"]
        done = await results(client, batch.output_file_id)
        assert 0 < len(done) == batch.request_counts.completed < 60
        assert all(one["response"]["status_code"] == 200 for one in done.values())
        assert disk.num_left < 0 and not (tmp_path / "reserve").exists()
        disk.num_left = 100_000
        await ended(client, (await send(client, jsonl([line("a")]))).id)
        assert (tmp_path / "reserve").exists()
    monkeypatch.undo()
    async with serving(tmp_path) as (_, client):
        again = await client.batches.retrieve(batch.id)
        assert again == batch
        assert await results(client, batch.output_file_id) == done
        assert (tmp_path / "reserve").exists()


async def test_an_upload_that_the_disk_does_not_take_is_a_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (_, client):
        await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        Full(tmp_path, monkeypatch, 0, has_reserve=False)
        with pytest.raises(openai.InternalServerError, match="No space left on device") as full:
            await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        assert full.value.status_code == 507
        assert len(_names(tmp_path, "*/files/*.jsonl")) == 1


def _damage(folder: Path, batch_id: str, file_id: str) -> None:
    (owner,) = folder.glob("*/owner.json")
    owner.write_text("")
    (owner.parent / "batches" / f"{batch_id}.json").write_bytes(b"\0" * 100)
    (owner.parent / "files" / f"{file_id}.json").write_text("[" * 100_000)


async def test_a_damaged_state_costs_one_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as (_, client):
        first = await ended(client, (await send(client, jsonl([line("a")]))).id)
        second = await ended(client, (await send(client, jsonl([line("b")]))).id)
    _damage(tmp_path, first.id, first.output_file_id)
    async with serving(tmp_path) as (_, client):
        assert [one.id for one in (await client.batches.list()).data] == [second.id]
        assert (await results(client, second.output_file_id)).keys() == {"b"}
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(first.id)
        third = await ended(client, (await send(client, jsonl([line("c")]))).id)
        assert third.status == "completed"
    assert _names(tmp_path, "*/batches/*.damaged") == [f"{first.id}.json.damaged"]
    assert f"it is kept as {tmp_path}" in caplog.text
    assert _names(tmp_path, f"*/files/{first.output_file_id}.jsonl")


def test_a_tenant_has_a_share_of_what_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_LIVE_BATCHES", 8)
    monkeypatch.setattr(stores, "MAX_FILES", 8)
    store = Store(tmp_path, 800, 0.5)
    for owner, most in (("a", 4), ("b", 2), ("c", 1)):
        for i in range(most):
            store.add_batch(batch_of(owner, f"batch_{owner}{i}"))
            store.add_file(owner, io.BytesIO(b"x" * 100), "f")
        with pytest.raises(QueueFull, match=f"{most} batches have not ended, the limit is {most}"):
            store.add_batch(batch_of(owner, f"batch_{owner}more"))
        with pytest.raises(StorageError, match=f"{most} files are kept, the limit is {most}"):
            store.add_file(owner, io.BytesIO(b"x"), "f")
        with pytest.raises(StorageError, match=f"{most}00 of {most}00 bytes are used"):
            store.grow(owner, 1)
    store.delete_file("a", store.files("a")[0].id)
    store.close()
    store = Store(tmp_path, 800, 0.5)
    with pytest.raises(StorageError, match="300 of 250 bytes"):
        store.grow("a", 1)
    store.close()


def test_uploads_of_one_tenant_leave_slots_to_others() -> None:
    uploads = _Uploads(0.5)
    with contextlib.ExitStack() as stack:
        for owner, most in (("a", 8), ("b", 4), ("c", 2)):
            for _ in range(most):
                stack.enter_context(uploads.slot(owner))
            with pytest.raises(QueueFull), uploads.slot(owner):
                pass
        with uploads.slot("d"):
            pass
    with uploads.slot("a"):
        assert uploads._num_open == {"a": 1}


async def test_a_slow_upload_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_of_batches, "UPLOAD_GRACE_S", 0.1)
    async with serving(tmp_path) as (harness, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.server.http_port)
        writer.write(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n")
        writer.write(b"content-length: 1000\r\n\r\n--b\r\n")
        async with asyncio.timeout(300):
            assert (await reader.readline()).startswith(b"HTTP/1.1 504")
            assert b"slower than" in await reader.readuntil(b"}}")
        writer.close()


def test_a_batch_that_cannot_be_kept_is_not_run(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    batch = batch_of("", "batch_a")
    store.path("", "file-a")  # makes the owner's folders
    (folder,) = tmp_path.glob("*/batches")
    folder.rmdir()
    with pytest.raises(StorageError, match="a batch cannot be written"):
        store.add_batch(batch)
    assert store.live() == [] and store.batches("") == []
    folder.mkdir()
    store.add_batch(batch)
    assert store.live() == [batch]
    store.close()
