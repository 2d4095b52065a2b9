"""Compiles :data:`tests.recorded.rules.PROGRAMS`: ``python -m tests.recorded.rules.record [NAME...]``."""

import json
import lzma
import re
import sys

from tests.recorded.rules import PROGRAMS, SCHEDULES, texts

_LEFT_OUT = re.compile(
    r", metadata=\{[^{}]*\}|, (?:sharding|frontend_attributes)=\{(?:[^{}]|\{[^{}]*\})*\}|\"(?:used_)?scoped_memory_configs\":\[[^\]]*\],?|\"flag_configs\":\[\],?"
)


def record(names: list[str]) -> None:
    """Compiles programs and keeps their schedules."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from systolic.forecasting.function import forecast_function

    kinds = {
        "f32": "float32",
        "bf16": "bfloat16",
        "s32": "int32",
        "u32": "uint32",
        "c64": "complex64",
    }
    found = dict(texts()) if SCHEDULES.exists() else {}
    for name in names or PROGRAMS:
        on, source, given = PROGRAMS[name]
        args = []
        for one in given:
            kind, _, dims = one.rstrip("]").partition("[")
            args.append(jax.ShapeDtypeStruct(tuple(map(int, dims.split(","))), kinds[kind]))
        function = eval(source, {"jax": jax, "jnp": jnp, "lax": lax})
        made = forecast_function(function, *args, on=on)
        assert made.answer is not None
        lines = made.answer.hlo.splitlines()
        kept = [
            line
            for line in lines
            if not re.match(r"\d+ |FileNames|FunctionNames|FileLocations|StackFrames|$", line)
        ]
        found[name] = _LEFT_OUT.sub("", "\n".join(kept)).replace(",}", "}")
        print(name, len(found[name]), f"{(made.step_seconds or 0) * 1e6:.1f} us")
    SCHEDULES.write_bytes(lzma.compress(json.dumps(found, sort_keys=True).encode(), preset=9))


if __name__ == "__main__":
    record(sys.argv[1:])
