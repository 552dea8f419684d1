"""Results of a request -> ModelInferResponse: the requested tensors, with one element per sequence.

In a stream each response has elements for all sequences; those without news are empty. Its parameter
`triton_final_response` marks the request's last response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged import json_text
from jpaged._proto.open_inference import inference_pb2
from jpaged.server.faces.open_inference.model import OUTPUTS, VERSION
from jpaged.server.faces.open_inference.request import Ask
from jpaged.server.faces.open_inference.tensors import add_output
from jpaged.types import OutputEvent, PositionLogprobs, RequestOutput

FINAL = "triton_final_response"
_UNFINISHED = "None"
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Piece:
    """Content of one response for one sequence.

    Attributes:
        finish_reason: "None" while it is running, as in vLLM's backend.
        cumulative_logprob: sum over all tokens of the sequence so far.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: str = _UNFINISHED
    cumulative_logprob: float = 0.0


class Responses:
    """Builds the responses of one request.

    Args:
        model: name of the model, as requested.
        token_text: returns the text of a single token.
    """

    def __init__(self, ask: Ask, model: str, token_text: TokenText) -> None:
        self._ask = ask
        self._model = model
        self._token_text = token_text
        self._so_far = [Piece()] * ask.sampling.n

    def whole(self, output: RequestOutput) -> inference_pb2.ModelInferResponse:
        """Return the response of a finished request that is not streamed."""
        pieces = [
            Piece(
                text=self._ask.prefix + one.text,
                token_ids=one.token_ids,
                logprobs=one.logprobs or (),
                finish_reason=one.finish_reason,
                cumulative_logprob=one.cumulative_logprob or 0.0,
            )
            for one in output.outputs
        ]
        return self._response(pieces, output.usage.prompt_tokens)

    def next(self, event: OutputEvent) -> inference_pb2.ModelInferResponse:
        """Return the response of an event of a streamed request."""
        before = self._so_far[event.index]
        self._so_far[event.index] = Piece(
            finish_reason=_UNFINISHED if event.finish is None else event.finish.reason.value,
            cumulative_logprob=before.cumulative_logprob
            if event.cumulative_logprob is None
            else event.cumulative_logprob,
        )
        pieces = [*self._so_far]
        pieces[event.index] = replace(
            pieces[event.index], text=event.text, token_ids=event.token_ids, logprobs=event.logprobs
        )
        response = self._response(pieces, event.usage.prompt_tokens)
        response.parameters[FINAL].bool_param = event.is_last
        return response

    def _response(self, pieces: Sequence[Piece], num_input_tokens: int) -> inference_pb2.ModelInferResponse:
        ask = self._ask
        response = inference_pb2.ModelInferResponse(model_name=self._model, model_version=VERSION, id=ask.id)
        for name in ask.outputs:
            elements = [num_input_tokens] if name == "num_input_tokens" else self._elements(name, pieces)
            add_output(response, name, OUTPUTS[name].datatype, elements, is_typed=ask.is_typed)
        return response

    def _elements(self, name: str, pieces: Sequence[Piece]) -> list[Any]:
        match name:
            case "text_output":
                return [one.text.encode() for one in pieces]
            case "finish_reason":
                return [one.finish_reason.encode() for one in pieces]
            case "cumulative_logprob":
                return [one.cumulative_logprob for one in pieces]
            case "logprobs":
                return [self._logprobs(one).encode() for one in pieces]
            case "num_output_tokens":
                return [len(one.token_ids) for one in pieces]
            case _:
                return [token_id for one in pieces for token_id in one.token_ids]

    def _logprobs(self, piece: Piece) -> str:
        """Return JSON with an object per position: token ids with their log-probabilities, ranks and texts."""
        if not self._ask.has_logprobs:
            return "null"
        return json_text.dumps(
            [
                {
                    str(one.token_id): {
                        "logprob": one.logprob,
                        "rank": one.rank,
                        "decoded_token": self._token_text(one.token_id),
                    }
                    for one in (position.chosen, *position.top, *position.asked)
                }
                for position in piece.logprobs
            ]
        )


def failure_of(ask_id: str, model: str, message: str) -> inference_pb2.ModelStreamInferResponse:
    """Return the stream response of a request that failed, or could not be parsed."""
    answer = inference_pb2.ModelInferResponse(model_name=model, model_version=VERSION, id=ask_id)
    answer.parameters[FINAL].bool_param = True
    return inference_pb2.ModelStreamInferResponse(error_message=message, infer_response=answer)
