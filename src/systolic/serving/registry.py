"""Models of a server by name and version, swapped without a dropped request."""

import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from systolic.core.errors import NotFoundError, OptionError
from systolic.data.text.chat import ChatTemplate
from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.text.request import TextEngine

if TYPE_CHECKING:
    from systolic.serving.batch.model import DynamicBatches
    from systolic.serving.text.adapters import AdapterSlots

ENDS = ("versions", "labels", "metadata", "ready", "infer", "load", "unload")
"""Words that follow a model's name in paths, and so can't be in the name after a ``/``."""
NAME_IN_PATH = rf"[^/]+(?:/(?!(?:{'|'.join(ENDS)})(?:/|$))[^/]+)*"
"""A name of one part or of several, such as ``org/model``."""
_NAME = re.compile(r"(?=.{1,128}$)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


Key = tuple[str, int]
"""Name and version of a model."""


def check_name(name: str, cure: str) -> None:
    """Refuses a name of a model that a path of the server can't have.

    Args:
        name: Of the model.
        cure: Begins what to do: ``write NAME=DIR``.

    Raises:
        OptionError: it has other signs, or a part that follows names.
    """
    if _NAME.fullmatch(name) is None:
        raise OptionError(
            f"{name!r} is no name for a model; {cure} with letters, digits, '.', '_', '-', and '/' between them"
        )
    if taken := set(name.split("/")[1:]) & set(ENDS):
        raise OptionError(
            f"{name!r} has the part {taken.pop()!r}, which follows the model's name in the server's paths; {cure} with another name"
        )


class LiveEngine(TextEngine, Protocol):
    """A text engine with the life of a server's model."""

    @property
    def ready(self) -> bool:
        """Whether every program is compiled and the loop runs."""
        ...

    @property
    def heartbeat_seconds(self) -> float:
        """Since the loop last turned."""
        ...

    def start(self) -> None:
        """Compiles every program and starts the loop; returns when it is ready."""
        ...

    def drain(self, seconds: float) -> bool:
        """Refuses new requests, and waits until those that were taken have ended; False where time ran out."""
        ...

    def stop(self) -> None:
        """Ends at once; requests that are left are cancelled."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelVersion:
    """A version of a model that a server has open."""

    name: str
    version: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""
    contents: str = ""
    """Fingerprint of the files that it was opened from; empty where it is not known."""
    base: str = ""
    """Name of the model whose engine answers, of an adapter; it comes and goes with that model."""

    @property
    def key(self) -> Key:
        """Its name and version."""
        return self.name, self.version


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedText(ModelVersion):
    """A language model with what turns requests into its tokens."""

    engine: LiveEngine
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    """None for a model that knows no chat."""
    slots: "AdapterSlots | None" = None
    """Places of adapters; None for a model without, and for an adapter."""
    adapters: "Sequence[ServedText]" = ()
    """The same engine by other names, each with an adapter, when the model was opened."""

    @property
    def kind(self) -> str:
        """``chat``, or ``text`` for a model that knows no chat."""
        return "text" if self.template is None else "chat"

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""
        return self.engine.ready

    @property
    def heartbeat_seconds(self) -> float:
        """Since its loop last turned."""
        return self.engine.heartbeat_seconds

    def start(self) -> None:
        """Makes it ready."""
        self.engine.start()

    def drain(self, seconds: float) -> bool:
        """Ends it when its requests have ended; False where time ran out."""
        drained = self.engine.drain(seconds)
        self.engine.stop()
        return drained


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedBatch(ModelVersion):
    """A model that answers whole requests."""

    model: "DynamicBatches"

    @property
    def kind(self) -> str:
        """Its task."""
        return self.model.kind.value

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""
        return self.model.ready

    @property
    def heartbeat_seconds(self) -> float:
        """Since it failed, or a worker was found stuck."""
        return self.model.heartbeat_seconds

    def start(self) -> None:
        """Makes it ready."""
        self.model.start()

    def drain(self, seconds: float) -> bool:
        """Ends it when its requests have ended; False where time ran out."""
        drained = self.model.drain(seconds)
        self.model.close()
        return drained


Served = ServedText | ServedBatch


def adapters_of(served: Served) -> Sequence[ServedText]:
    """Adapters that a model was opened with."""
    return served.adapters if isinstance(served, ServedText) else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelLoad:
    """A version of a model that is to be opened."""

    key: Key
    open: Callable[[], Served]
    """Opens it, not started."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReloadPlan:
    """Changes after which a server holds what its folders do."""

    added: Sequence[ModelLoad] = ()
    """Versions that are new, or have other contents."""
    gone: Sequence[Key] = ()
    unchanged: Sequence[Key] = ()


@dataclass(kw_only=True, eq=False)
class _ServedModel:
    """A model and the requests that use it."""

    served: Served
    users: int = 0


class ModelRegistry:
    """The models of a server, from any thread. The newest version of a name answers where none is asked for."""

    def __init__(self, models: Sequence[Served] = ()) -> None:
        self._changed = threading.Condition()
        self._places: dict[str, dict[int, _ServedModel]] = {}
        for served in models:
            self.put(served)

    def put(self, served: Served) -> None:
        """Adds a model, which is started before unless no request can come yet.

        Raises:
            OptionError: that version of that name is there.
        """
        with self._changed:
            versions = self._places.setdefault(served.name, {})
            if served.version in versions:
                raise OptionError(
                    f"version {served.version} of {served.name} is served; give another version"
                )
            versions[served.version] = _ServedModel(served=served)
            for adapter in adapters_of(served):
                self.put(adapter)

    def retire(self, name: str, version: int, seconds: float) -> bool:
        """Takes a model out when no request uses it: new ones go to the newest of the other versions at once.

        Returns:
            Whether every request that used it has ended within ``seconds``.

        Raises:
            NotFoundError: there is no such model.
        """
        with self._changed:
            places = self._take_out(self._place(name, version).served, ())
        return self._end(places, seconds)

    def _take_out(self, served: Served, others: Sequence[Served]) -> list[_ServedModel]:
        """Takes out a model, and its adapters, those that clients loaded included; puts others in, which keep the order of names."""
        adapters = [own for own in self.everything() if (own.base, own.version) == served.key]
        places = [self._places[own.name].pop(own.version) for own in (served, *adapters)]
        for other in others:
            self._places.setdefault(other.name, {})[other.version] = _ServedModel(served=other)
        self._places = {name: versions for name, versions in self._places.items() if versions}
        return places

    def swap(self, served: Served, seconds: float) -> bool:
        """Puts a started model in the place of the one of its name and version: new requests go to it at once.

        Returns:
            Whether every request of the other one has ended within ``seconds``.

        Raises:
            NotFoundError: there is no such model.
        """
        with self._changed:
            place = self._place(served.name, served.version)
            places = self._take_out(place.served, (served, *adapters_of(served)))
        return self._end(places, seconds)

    def _end(self, places: Sequence[_ServedModel], seconds: float) -> bool:
        """Ends a model, the first, when no request uses it or its adapters."""
        end = time.monotonic() + seconds
        with self._changed:
            idle = self._changed.wait_for(
                lambda: not any(place.users for place in places), timeout=seconds
            )
        return places[0].served.drain(max(end - time.monotonic(), 0.0)) and idle

    @contextmanager
    def use(self, name: str, version: int | None = None) -> Generator[Served]:
        """A model for one request, kept until the request ends.

        Raises:
            NotFoundError: there is no such model.
        """
        with self._changed:
            place = self._place(name, version)
            place.users += 1
        try:
            yield place.served
        finally:
            with self._changed:
                place.users -= 1
                self._changed.notify_all()

    def newest(self) -> list[Served]:
        """The newest version of each name, in the order of the names' arrival."""
        with self._changed:
            return [versions[max(versions)].served for versions in self._places.values()]

    def versions(self, name: str) -> list[Served]:
        """All versions of a name, oldest first.

        Raises:
            NotFoundError: there is no such name.
        """
        with self._changed:
            self._place(name, None)
            return [self._places[name][number].served for number in sorted(self._places[name])]

    def everything(self) -> list[Served]:
        """All versions of all names."""
        with self._changed:
            return [
                place.served for versions in self._places.values() for place in versions.values()
            ]

    def _place(self, name: str, version: int | None) -> _ServedModel:
        versions = self._places.get(name)
        if versions is None:
            known = ", ".join(self._places) or "none"
            raise NotFoundError(f"there is no model {name!r}; served are: {known}")
        if version is not None and version not in versions:
            known = ", ".join(map(str, sorted(versions)))
            raise NotFoundError(f"{name} has no version {version}; served are: {known}")
        return versions[max(versions) if version is None else version]
