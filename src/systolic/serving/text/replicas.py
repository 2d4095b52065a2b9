"""Several engines of one model as one: each request goes to the engine that has the least to do for it."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from systolic.data.text.text_data import TextData
from systolic.inference.grammar import Grammars
from systolic.job import Batch, Job, Layout
from systolic.models.decoder.config import Decoder
from systolic.serving.registry import LiveEngine
from systolic.serving.request import RefusedError
from systolic.serving.text.converting import capacity_bytes, held_bytes
from systolic.serving.text.opening import EngineSizes, context_of
from systolic.serving.text.request import AnswerStream, TextRequest
from systolic.serving.text.scheduler import next_key
from systolic.steps.paged import PagedSteps
from systolic.steps.serving_layout import DeviceShares, EngineNeed, ServingLayout, share
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget

REMEMBERED = 1 << 16
"""Pages of prompts whose engine is remembered."""


class Replica(LiveEngine, Protocol):
    """An engine among others."""

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of its requests that it has not read or made yet."""
        ...


class Replicas:
    """Implements :class:`systolic.serving.registry.LiveEngine` over engines of one model on devices of their own.

    What an engine has to do for a request are the tokens of its other requests and those of the prompt that it
    has not read for another one: texts that begin alike meet on the engine that holds their pages, as long as
    others are no less busy by as much as that saves. Where an engine refuses a request, the next is asked.

    Args:
        engines: At least one.
        page_size: Positions of a page.
    """

    def __init__(self, engines: Sequence[Replica], page_size: int) -> None:
        self.engines, self._page_size = engines, page_size
        self._lock = threading.Lock()
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        """Key of a prompt's beginning, in full pages, to the engine that read it last."""

    @property
    def context(self) -> int:
        """See :class:`systolic.serving.text.request.TextEngine`."""
        return self.engines[0].context

    @property
    def grammars(self) -> Grammars:
        """See :class:`systolic.serving.text.request.TextEngine`."""
        return self.engines[0].grammars

    @property
    def ready(self) -> bool:
        """Whether all engines take requests."""
        return all(engine.ready for engine in self.engines)

    @property
    def heartbeat_seconds(self) -> float:
        """Since the slowest loop last turned."""
        return max(engine.heartbeat_seconds for engine in self.engines)

    def start(self) -> None:
        """Starts all engines."""
        for engine in self.engines:
            engine.start()

    def submit(self, request: TextRequest) -> AnswerStream:
        """See :class:`systolic.serving.text.request.TextEngine`.

        Raises:
            RefusedError: as the last engine that was asked.
        """
        keys = self._keys(request)
        refused: RefusedError | None = None
        for number in self._order(keys):
            try:
                stream = self.engines[number].submit(request)
            except RefusedError as error:
                refused = error
                continue
            self._remember(keys, number)
            return stream
        assert refused is not None
        raise refused

    def drain(self, seconds: float) -> bool:
        """See :class:`systolic.serving.registry.LiveEngine`."""
        end = time.monotonic() + seconds
        ended = [False] * len(self.engines)

        def drain_engine(number: int) -> None:
            ended[number] = self.engines[number].drain(max(end - time.monotonic(), 0.0))

        # All of them at once: each refuses new requests from the beginning.
        threads = [threading.Thread(target=drain_engine, args=(n,)) for n in range(len(ended))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return all(ended)

    def stop(self) -> None:
        """Ends all engines at once."""
        for engine in self.engines:
            engine.stop()

    def _keys(self, request: TextRequest) -> list[bytes]:
        """Keys of the full pages of a prompt, the longest first."""
        tokens, keys, size = request.tokens, [request.root], self._page_size
        for start in range(0, len(tokens) - len(tokens) % size, size):
            keys.append(next_key(keys[-1], tokens[start : start + size]))
        return keys[:0:-1]

    def _order(self, keys: Sequence[bytes]) -> list[int]:
        """Engines, the one with the least to do first."""
        work = [engine.outstanding_tokens for engine in self.engines]
        with self._lock:
            for saved, key in zip(range(len(keys), 0, -1), keys, strict=True):
                if (holder := self._holders.get(key)) is not None:
                    work[holder] -= saved * self._page_size
                    break
        # One that has stopped refuses at once, and would always have the least to do.
        return sorted(range(len(work)), key=lambda n: (not self.engines[n].ready, work[n]))

    def _remember(self, keys: Sequence[bytes], number: int) -> None:
        with self._lock:
            for key in reversed(keys):
                self._holders[key] = number
                self._holders.move_to_end(key)
            while len(self._holders) > REMEMBERED:
                self._holders.popitem(last=False)


@dataclass(kw_only=True)
class ReplicaPlacement:
    """Shares out devices for the first engine of a model, and gives the others theirs."""

    layout: ServingLayout
    sizes: EngineSizes
    report: Callable[[DeviceShares], None] = lambda _: None
    """Called with what was chosen."""
    adapted: Callable[[Job], Job] = lambda job: job
    """The job with room for the adapters of :attr:`sizes`."""
    shares: DeviceShares | None = None
    """None until an engine was placed."""

    @property
    def engines(self) -> int:
        """Engines of the model; one where it is no language model."""
        return 1 if self.shares is None else self.shares.engines

    def place(
        self, job: Job, platform: str, devices: Sequence[Any], number: int
    ) -> tuple[Layout, Sequence[Any]] | None:
        """Layout and devices of an engine; None where the job continues no texts.

        Args:
            job: The model's.
            platform: Of the devices.
            devices: Of this machine.
            number: Which engine.

        Raises: as :func:`systolic.steps.serving_layout.share`.
        """
        model = job.model
        if not isinstance(job.data, TextData) or not isinstance(model, Decoder):
            return None
        if self.shares is None:
            self.shares = share(
                self.layout,
                len(devices),
                model,
                lambda tensor: self._need(job, platform, devices, tensor),
            )
            self.report(self.shares)
        each = self.shares.each
        return self.shares.layout, devices[number * each : (number + 1) * each]

    def _need(self, job: Job, platform: str, devices: Sequence[Any], tensor: int) -> EngineNeed:
        shares = DeviceShares(
            devices=len(devices), engines=1, tensor=tensor, expert=self.layout.expert, reason=""
        )
        placed = replace(self.adapted(job), layout=shares.layout, batch=Batch(total=shares.each))
        target = MeshTarget.of(placed, platform, devices[: shares.each])
        steps = StepFunctions(placed, target, trains=False)
        data = job.data
        assert isinstance(data, TextData)
        sizes, context = self.sizes, context_of(steps, data, self.sizes)
        paged = PagedSteps(steps, sizes.page_size, sizes.cache, adapters=sizes.adapters)
        longest = -(-context // self.sizes.page_size)
        pages = self.sizes.pages or self.sizes.rows * longest + 1
        held = held_bytes(paged.placed_weights) + held_bytes(paged.placed_pages(pages))
        return EngineNeed(bytes=held, capacity_bytes=capacity_bytes(devices[: shares.each]))
