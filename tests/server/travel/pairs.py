"""Two servers, between which prefixes travel, and what they send, to look at and to damage."""

from contextlib import asynccontextmanager

from jpaged._proto.v1 import prefixes_pb2
from jpaged.client import AsyncClient
from jpaged.client.prefixes import MAGIC
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.server.harness import eventually, running

TEXT = "you are a story teller, and tell the stories of everything that there is"
NUM_FULL = len(TEXT) // 4 * 4
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def executor(**sizes):
    return FakeExecutor(**{"num_host_blocks": 40, "max_model_len": 256, "num_blocks": 96, **sizes})


@asynccontextmanager
async def two(a=None, b=None, **options):
    """Two servers with a client each; the second may fetch from the first."""
    a_executor, b_executor = a or executor(), b or executor()
    async with (
        running(executor=a_executor, **options) as first,
        running(executor=b_executor, prefix_peers=[first.target], **options) as second,
        AsyncClient(first.target) as a_client,
        AsyncClient(second.target) as b_client,
    ):
        yield first, a_client, second, b_client
        await is_at_rest(first)
        await is_at_rest(second)


async def is_at_rest(harness):
    """Nothing travels any more, and nothing is held."""
    memory = harness.serving.engine._loop.memory
    await eventually(
        lambda: not list(memory.held.tables()) and not memory.host._held and not memory.host.pending_callbacks
    )
    await eventually(lambda: harness.num_blocks_used == 0)


async def saved_by(client, text=TEXT, **of):
    return [chunk async for chunk in client.prefixes.save(text, **of)]


def messages_of(saved):
    """The messages of a saved prefix, to damage."""
    return [prefixes_pb2.LoadPrefixRequest.FromString(chunk[4:]) for chunk in saved[1:]]


def framed(messages):
    contents = [message.SerializeToString() for message in messages]
    return [MAGIC, *(len(content).to_bytes(4, "little") + content for content in contents)]
