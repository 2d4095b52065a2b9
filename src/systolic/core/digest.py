"""Content digests: the same value has the same digest on every machine."""

import hashlib
import json
from typing import Any


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, the text whose digest names a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: Any, length: int = 16) -> str:
    """The first ``length`` hex digits of the SHA-256 of a JSON-like value."""
    return hashlib.sha256(canonical(value)).hexdigest()[:length]
