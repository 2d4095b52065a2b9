"""Requests of batch models: submitted, awaited, dropped when the client leaves."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import CancelledError

import numpy as np
from starlette.requests import Request

from systolic.serving.batch.request import ModelKind
from systolic.serving.http.desk import Ticket
from systolic.serving.http.events import attended
from systolic.serving.http.problems import ProblemError
from systolic.serving.served import ServedBatch
from systolic.serving.text.request import Usage


async def answered(
    request: Request, served: ServedBatch, inputs: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """The outputs of a model for some inputs.

    Raises: as :meth:`~systolic.serving.batch.request.BatchModel.submit` and its future.
    """
    ticket = Ticket.of(request)
    future = served.model.submit(inputs, deadline_seconds=ticket.deadline_seconds)
    ticket.at_end(future.cancel)
    try:
        found = await attended(request, asyncio.wrap_future(future))
    except CancelledError as error:
        raise ProblemError(
            status=503, message="the request was cancelled", retry_seconds=1.0
        ) from error
    ticket.examples = len(next(iter(found.values()), ()))
    if served.model.kind is ModelKind.embedding:
        tokens = int(np.sum(found["tokens"]))
        ticket.spend(tokens)
        ticket.usage = Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=0)
    return found


def objects(values: list[bytes] | list[object]) -> np.ndarray:
    """Values as an object array [n], whatever they are."""
    made = np.empty(len(values), object)
    made[:] = values
    return made
