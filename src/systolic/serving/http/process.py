"""The server's life: listening at once, ready when warm, ending when its requests have ended."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import h11
import psutil
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.core.machine import trim
from systolic.core.ranges import NOT_NEGATIVE, Range, check
from systolic.serving.http.app import RequestMiddleware, application
from systolic.serving.http.keys import Keys
from systolic.serving.http.state import ServerState
from systolic.serving.http.telemetry import EventLog, find_traces
from systolic.serving.registry import (
    Key,
    ModelLoad,
    ReloadPlan,
    Served,
    ServedText,
    adapters_of,
    check_name,
)

HEADER_SECONDS = 60.0
"""From the first byte of a connection, or of a further request on it, to the end of its headers."""
TICK_SECONDS = 0.05
LAST_SECONDS = 2.0
"""For answers that end with an error after the grace time."""
BACKLOG = 2048


class HeaderTimeoutProtocol(H11Protocol):
    """Closes a connection that holds no request and does not complete the headers of one in time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Reads on; waits as long as headers are incomplete."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait()
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._rest()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Address of a server, and how it ends.

    Raises:
        OptionError: a value out of its range, or one of the two TLS files without the other.
        NotFoundError: a TLS file that is not there.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    """0 takes a free one."""
    tls_cert: Path | None = None
    """Certificate chain, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    grace_seconds: Annotated[float, NOT_NEGATIVE] = 45.0
    """Time for the requests in flight when the server is told to end."""

    def __post_init__(self) -> None:
        check(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key go together; give both")
        for file in (self.tls_cert, self.tls_key):
            if file is not None and not file.is_file():
                raise NotFoundError(f"{file} is not a file; check the path")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_certificate(self.tls_cert, self.tls_key)


def _check_certificate(cert: Path, key: Path) -> None:
    """Refuses what TLS can't begin with.

    Raises:
        OptionError: no PEM files, a key of another certificate, or one behind a password.
    """

    def no_password() -> bytes:
        raise OptionError(
            f"{key} is encrypted, and a server has nobody to ask; decrypt it: openssl pkey -in {key} -out FILE"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, no_password)
    except OSError as error:  # of which SSLError is one
        known = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        reason = (
            "the key belongs to another certificate"
            if known
            else "give a certificate chain and its private key, both PEM"
        )
        raise OptionError(
            f"--tls-cert {cert} with --tls-key {key} can't be used: {reason}"
        ) from error


class Process(uvicorn.Server):
    """A server of models.

    The first SIGTERM or SIGINT drains: not ready, new requests are refused with 503, those in flight end, at most
    ``grace_seconds`` long. The second ends at once.

    Args:
        state: The models.
        pending: The models, opened in the background and in this order; each is started and put into the state.
        address: Where to listen.
        log: What happens.
        keys: API keys; None lets everyone in.
        renewal: What changes of all models at a SIGHUP, or of the one of a name.
        listening: Called with the port when the socket is open.
    """

    def __init__(
        self,
        state: ServerState,
        pending: Sequence[ModelLoad],
        address: Address,
        log: EventLog,
        keys: Keys | None = None,
        renewal: Callable[[str | None], ReloadPlan] | None = None,
        listening: Callable[[int], None] | None = None,
    ) -> None:
        middleware = RequestMiddleware(
            app=application(state), state=state, log=log, traces=find_traces(), keys=keys
        )
        super().__init__(
            uvicorn.Config(
                middleware,
                host=address.host,
                port=address.port,
                ssl_certfile=address.tls_cert,
                ssl_keyfile=address.tls_key,
                backlog=BACKLOG,
                http=HeaderTimeoutProtocol,  # It bounds the size and the time of headers.
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(LAST_SECONDS),
                timeout_keep_alive=75,
                h11_max_incomplete_event_size=1 << 16,
            )
        )
        self.state, self.address, self.log = state, address, log
        self._pending, self._keys = pending, keys
        state.opening = [load.key for load in pending]
        self._listening, self._renewal = listening, renewal
        self._renewing = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._starting: threading.Thread | None = None
        self.refused: SystolicError | None = None
        """Why the address can't be listened on."""

    async def startup(self, sockets: object = None) -> None:
        """Opens the socket, then starts the models."""
        del sockets
        self._loop = asyncio.get_running_loop()
        # uvicorn writes a line and ends the process where it can't listen; whoever runs this server says so.
        own = logging.getLogger("uvicorn.error")
        own.disabled = True
        try:
            await super().startup()
        except SystemExit as stop:
            self.should_exit = True
            self.refused = _refusal(self.address, stop.__context__)
            return
        finally:
            own.disabled = False
        port = self.servers[0].sockets[0].getsockname()[1]
        imported = time.time() - psutil.Process().create_time()
        self.state.metrics.startup.labels("all", "", "import").set(imported)
        self.log.write(
            "listening",
            host=self.address.host,
            port=port,
            pid=os.getpid(),
            seconds=round(imported, 3),
        )
        if self._listening is not None:
            self._listening(port)
        if self._renewal is not None and threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self.renew)
        self._starting = threading.Thread(
            target=self._start_models, name="systolic-start", daemon=True
        )
        self._starting.start()

    @property
    def opening(self) -> bool:
        """Whether a model is being opened, in threads that nothing can end."""
        return self._starting is not None and self._starting.is_alive()

    @property
    def url(self) -> str:
        """URL for a client on this machine."""
        scheme = "http" if self.address.tls_cert is None else "https"
        host = "127.0.0.1" if self.address.host in ("0.0.0.0", "::") else self.address.host
        port = self.servers[0].sockets[0].getsockname()[1]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def _start_models(self) -> None:
        begun = time.monotonic()
        with self._renewing:
            self.state.failed = next(filter(None, map(self._start, self._pending)), None)
        if self.state.failed is not None:
            self.end()
            return
        total = time.monotonic() - begun
        self.state.metrics.startup.labels("all", "", "total").set(total)
        self.state.opened = True
        self.log.write(
            "ready",
            seconds=round(total, 3),
            url=self.url,
            models=[
                {"name": served.name, "kind": served.kind}
                for served in self.state.registry.newest()
            ],
            keys=self._keys is not None or None,
        )

    def _start(self, pending: ModelLoad) -> str | None:
        """Opens a model, makes it ready and adds it, in the place of one of its name and version; the reason where that fails."""
        at, state, (name, version) = time.monotonic(), self.state, pending.key
        try:
            served = pending.open()
            served.start()
            seconds = time.monotonic() - at
            state.metrics.opened(name, version, seconds)
            self._add(served)
        except Exception as error:
            own = isinstance(error, SystolicError)
            reason = str(error) if own else f"{type(error).__name__}: {error}"
            state.metrics.failed(name, version)
            state.failures[pending.key] = reason
            self.log.write("failed", model=name, version=version, error=reason)
            return reason
        finally:
            state.opening = [key for key in state.opening if key != pending.key]
        self.log.write("warm", model=name, version=version, seconds=round(seconds, 3))
        return None

    def _add(self, served: Served) -> None:
        """Hands requests to a model; one of its name and version ends when its own have ended."""
        registry = self.state.registry
        held = [own.key for own in registry.everything()]
        for own in (served, *adapters_of(served)):
            self.state.failures.pop(own.key, None)
        if served.key not in held:
            registry.put(served)
            return
        whole = registry.swap(served, self.address.grace_seconds)
        self._forget(held)
        self.log.write("replaced", model=served.name, version=served.version, whole=whole)

    def renew(self) -> None:
        """Adds new models and retires those that are gone, in the background; no request is dropped."""
        if self._renewal is not None:
            threading.Thread(target=self._renew, args=(self._renewal,), daemon=True).start()

    def _renew(self, renewal: Callable[[str | None], ReloadPlan]) -> None:
        with self._renewing:
            try:
                self._change(renewal(None))
            except SystolicError as error:
                self.log.write("failed", error=str(error))

    def _change(self, renewal: ReloadPlan) -> str | None:
        """Adds models, then retires others; what is served stays until its successor works.

        Returns:
            Why the first of those that failed did.
        """
        state = self.state
        state.opening = [load.key for load in renewal.added]
        reasons = {load.key[0]: reason for load in renewal.added if (reason := self._start(load))}
        for name, version in renewal.unchanged:
            self.log.write("unchanged", model=name, version=version)
        held = [served.key for served in state.registry.everything()]
        for name, version in renewal.gone:
            if name in reasons:
                continue
            state.failures.pop((name, version), None)
            if (name, version) not in held:
                continue
            whole = state.registry.retire(name, version, self.address.grace_seconds)
            self._forget(held)
            self.log.write("retired", model=name, version=version, whole=whole)
        if renewal.added or renewal.gone:
            trim()
        return next(iter(reasons.values()), None)

    def _forget(self, held: Sequence[Key]) -> None:
        """Takes out the metrics of those versions that are served no longer, adapters of a model that went included."""
        for key in {*held} - {own.key for own in self.state.registry.everything()}:
            self.state.metrics.forget(*key)

    def load(self, name: str) -> ReloadPlan:
        """Makes the versions of a model ready that its folder has now and that are not served, or from other contents; returns when they are.

        Raises:
            NotFoundError: the server was not given such a model.
            RunError: a version can't be opened; what was served still is.
        """
        assert self._renewal is not None
        with self._renewing:
            renewal = self._renewal(name)
            reason = self._change(renewal)
            if any(served.name == name for served in self.state.registry.everything()):
                self.state.unloaded.discard(name)
        if reason is not None:
            raise RunError(reason)
        return renewal

    def unload(self, name: str) -> None:
        """Takes all versions of a model out when their requests have ended.

        Raises:
            NotFoundError: it is not loaded.
        """
        with self._renewing:
            versions = self.state.registry.versions(name)
            failed = [key for key in self.state.failures if key[0] == name]
            self.state.unloaded.add(name)
            self._change(ReloadPlan(gone=[*(served.key for served in versions), *failed]))

    def load_adapter(self, name: str, path: Path, replaces: bool = False) -> None:
        """Makes an adapter ready; returns when requests may name it.

        Args:
            name: Of the adapter.
            path: A run with adapters, or a folder of PEFT.
            replaces: Whether it may take the place of an adapter of its name, whose requests end first.

        Raises: as :meth:`systolic.serving.text.adapters.AdapterSlots.place`, and
            OptionError: the server has no room for adapters, or the name is taken or not valid.
        """
        from systolic.serving.text.adapters import with_adapter

        with self._renewing:
            everything = self.state.registry.everything()
            bases = [own for own in everything if isinstance(own, ServedText) and own.slots]
            same = next((own for own in everything if own.name == name), None)
            if not bases:
                raise OptionError(
                    "the server has no room for adapters; start it with --adapters and their number"
                )
            check_name(name, "give a lora_name")
            if same is not None and not (replaces and same.base):
                cure = "set load_inplace to replace it" if same.base else "give another name"
                raise OptionError(
                    f"{name} is {'an adapter' if same.base else 'a model'} that is served; {cure}"
                )
            absent = self.state.unloaded | {key[0] for key in self.state.failures}
            if name in absent - {*self.state.adapters}:
                raise OptionError(
                    f"{name} is a model that is not loaded now and may be again; give another name"
                )
            for base in bases:
                self._add(with_adapter(base, name, path))
            self.state.adapters[name] = path
            self.state.unloaded.discard(name)
            self.log.write("loaded", model=name, path=str(path))

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter out; returns when its requests have ended, at the latest after the time of grace.

        Raises:
            NotFoundError: it is not loaded.
            OptionError: it is a model and no adapter.
        """
        with self._renewing:
            served = {own.name for own in self.state.registry.everything()}
            if name not in served and self.state.adapters.pop(name, None) is not None:
                for key in [key for key in self.state.failures if key[0] == name]:
                    del self.state.failures[key]
                return  # It was left out when its model was opened again.
            versions = self.state.registry.versions(name)
            if not versions[0].base:
                raise OptionError(f"{name} is a model and no adapter; give the name of an adapter")
            self.state.adapters.pop(name, None)
            self._change(ReloadPlan(gone=[served.key for served in versions]))

    def end(self) -> None:
        """Begins to end; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended already.
                self._loop.call_soon_threadsafe(self._end)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one drains, the second one ends at once."""
        del sig, frame
        if self.state.draining:
            self.should_exit = self.force_exit = True
        self.end()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        self.state.draining = True
        begun = time.monotonic()
        end = begun + (0.0 if self.state.failed else self.address.grace_seconds)
        self.log.write("draining", in_flight=self.state.in_flight)
        while self.state.in_flight and time.monotonic() < end and not self.should_exit:
            await asyncio.sleep(TICK_SECONDS)
        cut = self.state.in_flight
        for served in self.state.registry.everything():
            await asyncio.to_thread(served.drain, 0.0)
        # Streams that were cut end with an error event.
        last = time.monotonic() + LAST_SECONDS
        while self.state.in_flight and time.monotonic() < last:
            await asyncio.sleep(TICK_SECONDS)
        self.log.write("ended", cut=cut, seconds=round(time.monotonic() - begun, 3))
        self.should_exit = True


def _refusal(address: Address, error: BaseException | None) -> SystolicError:
    """Why an address can't be listened on: its host, or else its port."""
    if isinstance(error, socket.gaierror):
        return OptionError(
            f"--host {address.host} is no address and no name that resolves here ({error.strerror}); give 127.0.0.1, 0.0.0.0 for all addresses, or one of this machine's"
        )
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return OptionError(
            f"--host {address.host} is no address of this machine; give 127.0.0.1, 0.0.0.0 for all addresses, or one of its own"
        )
    reason = "the server did not start" if code is None else os.strerror(code)
    reason = {
        errno.EADDRINUSE: "another process listens there",
        errno.EACCES: "this user is not allowed to",
    }.get(code or 0, reason)
    return RunError(
        f"{address.host}:{address.port} can't be listened on: {reason}; choose another --port, or 0 for a free one"
    )
