"""JSON on stdout and warnings on stderr."""

import json
import math
import sys
from typing import Any


def print_json(value: Any) -> None:
    """One JSON object on stdout; numbers that JSON has no form for become null."""
    sys.stdout.write(json.dumps(_finite(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """One line on stderr."""
    print(f"systolic: {text}", file=sys.stderr)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
