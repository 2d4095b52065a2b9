"""API keys: a file of their hashes, one a line: ``NAME sha256:HEX [rate=REQUESTS_PER_MINUTE]``.

A key has 256 random bits, so that a plain SHA-256 can't be searched; the file holds no key.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import write_atomically
from systolic.core.owner import others_who_write
from systolic.serving.http.limits import TokenBucket

_LINE = re.compile(r"(?P<name>\S+) sha256:(?P<hash>[0-9a-f]{64})(?: rate=(?P<rate>[0-9]{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
FRESH_SECONDS = 1.0
"""The file is looked at again after so long, so that a removed key is refused without a restart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One entry of the file."""

    name: str
    hash: bytes
    rate_per_minute: int | None = None
    """None takes the server's."""


@dataclass(kw_only=True, eq=False)
class Keys:
    """The keys of a file, read again when it changes, with what each may still ask.

    Raises:
        NotFoundError: there is no such file.
        DataError: a line does not parse, there is no key, or other users can write it.
    """

    file: Path
    rate_per_minute: int = 0
    _keys: tuple[Key, ...] = ()
    _stamp: tuple[int, int] = (0, 0)
    _checked: float = 0.0
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keys, self._stamp = read_keys(self.file), _stamp(self.file)
        self._checked = time.monotonic()

    def find(self, given: str) -> Key | None:
        """The entry of a key; None for one that is not in the file. Takes the same time for all."""
        self._refresh()
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.hash, digest):
                found = key
        return found

    def wait_seconds(self, key: Key) -> float:
        """Counts a request of a key: 0 where its rate allows it, else the seconds until it does."""
        rate = self.rate_per_minute if key.rate_per_minute is None else key.rate_per_minute
        if not rate:
            return 0.0
        bucket = self._buckets.get(key.name)
        if bucket is None or bucket.per_minute != rate:
            bucket = self._buckets[key.name] = TokenBucket.full(rate)
        return bucket.take(time.monotonic())

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < FRESH_SECONDS:
            return
        self._checked = now
        try:
            stamp = _stamp(self.file)
            if stamp != self._stamp:
                self._keys, self._stamp = read_keys(self.file), stamp
        except (OSError, NotFoundError, DataError):
            return  # A file that is being edited: the keys of before hold until it is whole.


def read_keys(file: Path) -> tuple[Key, ...]:
    """The keys of a file; errors as :class:`Keys`."""
    try:
        if (others := others_who_write(file)) is not None:
            raise DataError(
                f"{others}, so that others can add keys to {file}; run chmod 600 {file}"
            )
        lines = file.read_text().splitlines()
    except OSError as error:
        raise NotFoundError(
            f"{file} can't be read ({error.strerror}); make a key with systolic serve --keys {file} --new-key NAME"
        ) from error
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise DataError(f"{file}: line {number} is no key; lines are NAME sha256:HEX [rate=N]")
        rate = None if found["rate"] is None else int(found["rate"])
        keys.append(
            Key(name=found["name"], hash=bytes.fromhex(found["hash"]), rate_per_minute=rate)
        )
    if not keys:
        raise DataError(
            f"{file} has no key; make one with systolic serve --keys {file} --new-key NAME"
        )
    return tuple(keys)


def new_key(file: Path, name: str) -> str:
    """A new key, whose hash is added to a file that only this user can read and write; the key itself is kept nowhere.

    Raises:
        OptionError: the name has other signs than letters, digits, ``.``, ``_`` and ``-``, or is taken.
        DataError: as :class:`Keys`.
    """
    if _NAME.fullmatch(name) is None:
        raise OptionError(f"--new-key is {name!r}; use up to 64 letters, digits, '.', '_' or '-'")
    before = file.read_text() if file.exists() else ""
    if before and any(key.name == name for key in read_keys(file)):
        raise OptionError(f"{file} has a key {name}; choose another name, or delete its line")
    key = f"sk-{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"
    write_atomically(file, before + ("\n" if before and not before.endswith("\n") else "") + line)
    os.chmod(file, 0o600)
    return key


def _stamp(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_mtime_ns, state.st_ino
