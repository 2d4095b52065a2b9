"""API keys: a file of their hashes, one a line: ``NAME sha256:HEX [rate=REQUESTS] [tokens=TOKENS]``, both a minute.

A key has 256 random bits, so that a plain SHA-256 can't be searched; the file holds no key.
"""

import hashlib
import hmac
import math
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import others_who_write, write_atomically
from systolic.core.ranges import COUNT, POSITIVE, check

_LINE = re.compile(
    r"(?P<name>\S+) sha256:(?P<hash>[0-9a-f]{64})"
    r"(?: rate=(?P<rate>[0-9]{1,9}))?(?: tokens=(?P<tokens>[0-9]{1,12}))?"
)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Bounds of what a server takes.

    Raises:
        OptionError: a value out of its range.
    """

    body_bytes: Annotated[int, COUNT] = 64 << 20
    """Largest body of a request."""
    body_seconds: Annotated[float, POSITIVE] = 60.0
    """A request whose body has not arrived after so long is ended."""
    requests: Annotated[int, COUNT] = 2048
    """Requests that are answered or wait at once; more are refused with 503."""
    prompts: Annotated[int, COUNT] = 256
    """Prompts, texts or choices of one request."""
    heartbeat_seconds: Annotated[float, POSITIVE] = 10.0
    """An engine whose loop did not turn for so long makes the server not ready; six times as long, not alive."""
    deadline_seconds: Annotated[float, POSITIVE] | None = None
    """Ends each request so long after it came; a request may ask for less with the header X-Request-Timeout."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(kw_only=True)
class TokenBucket:
    """A rate with bursts: refills evenly over a minute, holds at most a minute's worth."""

    per_minute: int
    left: float
    at: float
    """Seconds of the monotonic clock when ``left`` was counted."""

    @classmethod
    def full(cls, per_minute: int) -> "TokenBucket":
        """A bucket that nothing was taken from."""
        return cls(per_minute=per_minute, left=float(per_minute), at=time.monotonic())

    def take(self, now: float) -> float:
        """Takes one; 0 where there was one, else the seconds until there is."""
        wait = self.wait_seconds(now)
        if not wait:
            self.left -= 1
        return wait

    def spend(self, count: int, now: float) -> None:
        """Takes what is known only afterwards; may leave a debt."""
        self._refill(now)
        self.left -= count

    def wait_seconds(self, now: float) -> float:
        """Seconds until there is one."""
        self._refill(now)
        return max(1 - self.left, 0.0) * 60 / self.per_minute

    def headers(self, what: str) -> dict[str, str]:
        """Headers that tell a client how much is left, as OpenAI names and writes them."""
        full = (self.per_minute - self.left) * 60 / self.per_minute
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(int(self.left), 0)),
            f"x-ratelimit-reset-{what}": duration(full),
        }

    def _refill(self, now: float) -> None:
        self.left = min(self.per_minute, self.left + (now - self.at) * self.per_minute / 60)
        self.at = now


def duration(seconds: float) -> str:
    """A time such as ``6m0s``, ``1.5s`` or ``12ms``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{rest:g}s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One entry of the file."""

    name: str
    hash: bytes
    rate_per_minute: int | None = None
    """Requests; None takes the server's."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers; None takes the server's."""


@dataclass(kw_only=True, eq=False)
class Keys:
    """The keys of a file, read again when it changes, with what each may still ask.

    Once open, a line that does not parse is no key, and a file that is gone, can't be read or can be written by others has
    none: a key that was taken out is refused whatever else is wrong.

    Raises:
        NotFoundError: there is no such file.
        DataError: a line does not parse, there is no key, or other users can write it.
    """

    file: Path
    rate_per_minute: int = 0
    """Requests of each key; 0 sets no bound."""
    tokens_per_minute: int = 0
    """Tokens of each key; 0 sets no bound."""
    fresh_seconds: float = 1.0
    """The file is looked at again after so long, so that a removed key is refused without a restart."""
    _keys: tuple[Key, ...] = ()
    _stamp: tuple[int, ...] = ()
    _checked: float = 0.0
    _buckets: dict[tuple[str, str], TokenBucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stamp = _stamp(self.file)
        self._keys = read_keys(self.file)
        self._checked = time.monotonic()

    def find(self, secret: str, warn: Callable[[str], None]) -> Key | None:
        """The entry of a key; None for one that is not in the file. Takes the same time for all.

        Args:
            secret: The key.
            warn: Called with what is wrong with the file, once after each change.
        """
        self._refresh(warn)
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
        match = None
        for key in self._keys:
            if hmac.compare_digest(key.hash, digest):
                match = key
        return match

    def rates(self, key: Key) -> dict[str, TokenBucket]:
        """Rates of a key: ``requests`` and ``tokens``, each if it is bounded."""
        limits = {
            "requests": (key.rate_per_minute, self.rate_per_minute),
            "tokens": (key.tokens_per_minute, self.tokens_per_minute),
        }
        buckets = {}
        for what, (own, common) in limits.items():
            rate = common if own is None else own
            if not rate:
                continue
            bucket = self._buckets.get((key.name, what))
            if bucket is None or bucket.per_minute != rate:
                bucket = self._buckets[key.name, what] = TokenBucket.full(rate)
            buckets[what] = bucket
        return buckets

    def _refresh(self, warn: Callable[[str], None]) -> None:
        now = time.monotonic()
        if now - self._checked < self.fresh_seconds:
            return
        self._checked = now
        stamp = _stamp(self.file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys, problems = _parsed(self.file)
        except (NotFoundError, DataError) as error:
            self._keys, problems = (), [f"{error}; until then all requests are refused"]
        else:
            if not self._keys:
                problems.append(f"{self.file} has no key; all requests are refused")
        for line in problems:
            warn(line)


def read_keys(file: Path) -> tuple[Key, ...]:
    """The keys of a file; errors as :class:`Keys`."""
    keys, problems = _parsed(file)
    if problems:
        raise DataError(problems[0])
    if not keys:
        raise DataError(
            f"{file} has no key; make one with systolic serve --keys {file} --new-key NAME"
        )
    return keys


def _parsed(file: Path) -> tuple[tuple[Key, ...], list[str]]:
    """The keys of a file, which can be none, and what is wrong with its other lines.

    Raises:
        NotFoundError: it can't be read.
        DataError: other users can write it.
    """
    try:
        if (others := others_who_write(file)) is not None:
            raise DataError(
                f"{others}, so that others can add keys to {file}; run chmod 600 {file}"
            )
        lines = file.read_text(errors="replace").split("\n")
    except OSError as error:
        raise NotFoundError(
            f"{file} can't be read ({error.strerror}); make a key with systolic serve --keys {file} --new-key NAME"
        ) from error
    keys, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = _LINE.fullmatch(line.strip())
        if fields is None:
            problems.append(
                f"{file}: line {number} is no key; lines are NAME sha256:HEX [rate=N] [tokens=N]"
            )
            continue
        rate = None if fields["rate"] is None else int(fields["rate"])
        tokens = None if fields["tokens"] is None else int(fields["tokens"])
        keys.append(
            Key(
                name=fields["name"],
                hash=bytes.fromhex(fields["hash"]),
                rate_per_minute=rate,
                tokens_per_minute=tokens,
            )
        )
    return tuple(keys), problems


def new_key(file: Path, name: str) -> str:
    """A new key, whose hash is added to a file that only this user can read and write; the key itself is kept nowhere.

    Raises:
        OptionError: the name has other signs than letters, digits, ``.``, ``_`` and ``-``, or is taken.
        DataError: as :class:`Keys`.
    """
    if _NAME.fullmatch(name) is None:
        raise OptionError(f"--new-key is {name!r}; use up to 64 letters, digits, '.', '_' or '-'")
    before = file.read_text() if file.exists() else ""
    keys, problems = _parsed(file) if before else ((), [])
    if problems:
        raise DataError(problems[0])
    if any(key.name == name for key in keys):
        raise OptionError(f"{file} has a key {name}; choose another name, or delete its line")
    key = f"sk-{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"
    write_atomically(file, before + ("\n" if before and not before.endswith("\n") else "") + line)
    os.chmod(file, 0o600)
    return key


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes with a file's content and permissions; empty where it can't be seen."""
    try:
        state = file.stat()
    except OSError:
        return ()
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino
