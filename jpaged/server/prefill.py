"""PrefillService: prefill for servers of the decode role."""

from __future__ import annotations

import asyncio
import dataclasses

from jpaged._proto.v1 import prefill_pb2, prefill_pb2_grpc
from jpaged.server.servicer import REQUEST_ID_KEY, call_from, response_of
from jpaged.server.status import CallContext, answering
from jpaged.server.travel.wire import pieces_of
from jpaged.service.roles import PrefillRole
from jpaged.service.service import AskedPrefill, Generation, Service

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """jpaged.v1.PrefillService."""

    def __init__(self, service: Service, role: PrefillRole) -> None:
        self._service = service
        self._role = role

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: CallContext) -> None:
        """Send the first tokens, then the blocks; release the blocks however the call ends."""
        async with answering(context):
            self._role.check_identity(request.kv_identity)
            metadata = context.invocation_metadata() or ()
            call = dataclasses.replace(
                call_from(request.request, metadata, context.time_remaining(), context.peer()),
                asked=AskedPrefill(request.cache_tenant, request.adapter_digest, request.num_known_blocks),
            )
            async with self._service.generate(call) as generation:
                await context.send_initial_metadata(((REQUEST_ID_KEY, generation.request_id),))
                async for event in generation:
                    told = response_of(event, generation.request_id)
                    await context.write(prefill_pb2.PrefillResponse(told=told))
                await self._send(generation, context)

    async def _send(self, generation: Generation, context: CallContext) -> None:
        model = self._service.state.loaded()
        try:
            async with asyncio.timeout(model.config.roles.prefill_hold):
                async for pieces in self._role.pieces(model, generation):
                    await context.write(prefill_pb2.PrefillResponse(pieces=pieces_of(pieces)))
        except TimeoutError:  # the caller computes the blocks that were not sent
            model.role_counts.add(num_holds_expired=1)
