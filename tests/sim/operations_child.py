"""Checks of ``benchmarks/operations`` in a process whose path is its folder: prints JSON."""

import json
import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).parents[2] / "benchmarks" / "operations"


def apart(made: Iterable[Any], wanted: Iterable[Any]) -> jax.Array:
    """The largest difference of two lists of arrays."""
    differences = [abs(a - b).max() for a, b in zip(made, wanted, strict=False)]
    return jax.numpy.stack(differences).max()


def of_attention(attention: Any, keys: jax.Array) -> dict[str, jax.Array]:
    """Chunks against the whole, the backward pass against JAX's own gradient; f32 matmuls."""
    attention.PRECISION, attention.CHUNKS = None, (16, 24)
    shape = (2, 40, 2, 8)
    given = {name: jax.random.normal(key, shape) for name, key in zip("qkv", keys, strict=False)}
    given["bias"] = jax.random.normal(keys[3], (1, 2, 40, 40))
    given["mask"] = jax.random.bernoulli(keys[4], 0.9, (2, 1, 1, 40))
    out, _, _ = attention.plain(given, causal=True, residuals=True)
    dout = jax.random.normal(keys[5], shape)

    def loss(q: Any, k: Any, v: Any) -> Any:
        arrays = given | {"q": q, "k": k, "v": v}
        return (attention.plain(arrays, causal=True, residuals=False) * dout).sum()

    wanted = jax.grad(loss, (0, 1, 2))(given["q"], given["k"], given["v"])
    gradient = partial(attention.backward, causal=True)
    made = gradient(given | {"dout": dout})
    again = str(jax.make_jaxpr(gradient)(given | {"dout": dout})).count("reduce_max")
    chunked = attention.chunked(given, causal=True)
    return {
        "chunked": apart([chunked], [out]),
        "backward": apart(made, wanted),
        "maxima": jax.numpy.array(again),
    }


def of_losses(losses: Any, keys: jax.Array) -> dict[str, jax.Array]:
    """Blocks against the whole, the backward pass against JAX's own gradient."""
    x, w = jax.random.normal(keys[0], (20, 8)), jax.random.normal(keys[1], (8, 48))
    labels = jax.numpy.arange(20)
    whole, lse = losses.forward(x, labels, w, mean=True, residuals=True)
    parts = losses.chunked(x, labels, w, mean=True, blocks=(16, 16), residuals=False)
    wanted = jax.grad(
        lambda x, w: losses.forward(x, labels, w, mean=True, residuals=False), (0, 1)
    )(x, w)
    made = losses.backward(1.0, lse, x, labels, w, mean=True)
    return {"loss": apart([parts], [whole]), "loss_backward": apart(made, wanted)}


def of_rows(rows: Any) -> dict[str, Any]:
    """Halves, what is judged, and a sample."""
    row = {
        "id": "a",
        "generation": "v6e",
        "what": "attention",
        "implementation": "xla",
        "shapes": {"q": "bf16[2,8,2,8]", "k": "bf16[2,8,2,8]", "v": "bf16[2,8,2,8]"},
        "measured_seconds": 1e-3,
    }
    halves = [rows.half_of(row | {"shapes": {**row["shapes"], "n": n}}) for n in range(64)]
    narrow = {name: text.replace("bf16", "f16") for name, text in row["shapes"].items()}
    kernel = {"implementation": "pallas"}
    variants = (
        {},
        {"measured_seconds": 2e-5},
        kernel,
        kernel | {"measured_seconds": 2e-5},
        kernel | {"what": "grouped_matmul"},
        kernel | {"what": "linear_softmax_cross_entropy"},
    )
    many = [row | {"id": f"{g}-{n}", "generation": g} for n in range(3) for g in ("v6e", "v5p")]
    return {
        "halves": halves.count("fit"),
        "same_half": rows.half_of(row | {"shapes": narrow}) == rows.half_of(row),
        "kernel": rows.kind_of(row | kernel),
        "judged": [rows.judged(row | more) for more in variants],
        "sample": [one["generation"] for one in rows.sample(many, 2)],
    }


def of_grouped(rows: Any, grouped: Any) -> dict[str, Any]:
    """Rows that took as long as a product with every group, the sizes that a program holds, and the residual's copy."""
    sizes = {"num_groups": 128, "total_size": 131072}
    shapes = {"lhs": "bf16[131072,2048]", "rhs": "bf16[128,2048,768]", "groups": sizes}
    row = {
        "id": "g",
        "generation": "v5p",
        "what": "grouped_matmul",
        "shapes": shapes | {"mode": "lhs[m,k] x rhs[g,k,n]"},
    }
    # 2 x 131072 x 2048 x 768 x 128 groups at 459 TFLOP/s are 115 ms.
    swapped = shapes | {"rhs": "bf16[128,768,2048]", "mode": grouped.TRANSPOSED}
    one = shapes | {"groups": {"num_groups": 128, "max": 131072, "total": 131072, "zeros": 127}}
    return {
        "dense": [
            rows.ran_dense(row | {"measured_seconds": 0.4}),
            rows.ran_dense(row | {"measured_seconds": 0.11}),
            rows.ran_dense(row | {"measured_seconds": 0.116, "shapes": swapped}),
            rows.ran_dense(row | {"measured_seconds": 0.11, "shapes": swapped}),
        ],
        "arguments": [len(grouped.with_sizes(None, some)[1]) for some in (shapes, one)],
        "twice": grouped.twice(lambda x: x + 1)(1),
    }


LINES = {
    "matmul": (
        "traced convolution fusion",
        "bf16[64,512]{1,0:T(8,128)(2,1)} fusion(bf16[512,256]{1,0:T(16,128)(2,1)} %, bf16[64,256]{1,0:T(8,128)(2,1)S(1)} %), kind=kOutput, calls=%",
        2.0 * 64 * 512 * 256 + 3 * 64 * 256,
    ),
    "sum": (
        "traced loop fusion",
        "f32[64]{0:T(128)S(1)} fusion(bf16[64,256]{1,0:T(8,128)(2,1)} %), kind=kLoop, calls=%",
        4.0 * 64 * 256,
    ),
    "gate": (
        "traced loop fusion",
        "bf16[64,256]{1,0:T(16,128)(2,1)} fusion(bf16[64,1,512]{2,0,1:T(8,128)(2,1)} %), kind=kLoop, calls=%",
        2.0 * 64 * 256,
    ),
    "rotation": (
        "traced loop fusion",
        "(bf16[64,8,64]{2,1,0:T(8,128)(2,1)S(1)}, bf16[64,8,64]{2,1,0:T(8,128)(2,1)S(1)}) fusion(bf16[64,8,128]{2,1,0:T(8,128)(2,1)S(1)} %, bf16[64,64]{1,0:T(8,128)(2,1)S(1)} %, bf16[64,64]{1,0:T(8,128)(2,1)S(1)} %), kind=kLoop, calls=%",
        6.0 * 64 * 8 * 64,
    ),
    "join": (
        "traced loop fusion",
        "bf16[64,8,128]{2,1,0:T(8,128)(2,1)S(1)} fusion(bf16[64,8,64]{2,1,0:T(8,128)(2,1)S(1)} %, bf16[64,8,64]{2,1,0:T(8,128)(2,1)S(1)} %), kind=kLoop, calls=%",
        4.0 * 64 * 8 * 128,
    ),
    "copy": (
        "traced data formatting",
        "f32[64,256]{0,1:T(8,128)} copy(f32[64,256]{1,0:T(8,128)S(1)} %)",
        0.0,
    ),
}
"""Category, HLO line and the profile's FLOPs of an op."""
IN_REGISTERS = ("gate", "rotation", "join")


def of_traced(traced: Any, work: Any, estimate: Any) -> dict[str, list[float]]:
    """FLOPs of the matrix units, vector operations, bytes of device memory and cycles of relayouts of each line's module."""
    found = {}
    for name, (what, line, flops) in LINES.items():
        shapes = {"hlo": line, "flops": flops, "bytes": 2.0 * 64 * 256 + 4 * 64}
        config = {"name": "pad_maximum_fusion", "kernel": "", "counted": None}
        row = {
            "what": what,
            "shapes": shapes,
            "config": config if name == "join" else config | {"name": "fusion"},
        }
        module = traced.program(row)
        op = module.entry.root
        paid = work.work_of(module, module.entry, op)
        held = module.callee(op, "calls") if op.opcode == "fusion" else module.entry
        near = estimate.slowdown_of("tpu7x").vector_memory
        operations = estimate.vector_operations(module, held, in_registers=name in IN_REGISTERS)
        relaid = estimate.relaid_cycles(module, module.entry, op, near)
        found[name] = [paid.flops, operations, paid.bytes, relaid]
    return found


def of_jaxbench(jaxbench: Any, rows: Any) -> dict[str, Any]:
    """Results of its programs, pages against the same keys in a row, groups of one expert against a product, and its times."""
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (2, 4, 8))
    k_pages, v_pages = (jax.random.normal(key, (6, 4, 2, 8)) for key in keys[1:])
    numbers, lengths = jax.numpy, [11, 9]
    pages = numbers.array([[5, 0, 3], [1, 2, 4]])
    made = jaxbench.paged_decode(q, k_pages, v_pages, numbers.array(lengths), pages)
    wanted = []
    for row, length in enumerate(lengths):
        k, v = (some[pages[row]].reshape(12, 2, 8)[:length] for some in (k_pages, v_pages))
        scores = numbers.einsum("gqd,kgd->gqk", q[row].reshape(2, 2, 8), k) / 8**0.5
        out = numbers.einsum("gqk,kgd->gqd", jax.nn.softmax(scores), v)
        wanted.append(out.reshape(4, 8))
    rows_of, experts = (
        jax.random.normal(keys[0], (1724, 8)),
        jax.random.normal(keys[1], (2, 8, 4)),
    )
    both = numbers.concatenate([rows_of[:700] @ experts[0], rows_of[700:1500] @ experts[1]])
    grouped = jaxbench.grouped(rows_of, experts, numbers.array([700, 800]))
    shapes = {}
    for name in jaxbench.PROGRAMS:
        row = {"what": jaxbench.WHAT, "shapes": {"program": name}, "generation": "v6e", "notes": ""}
        function, arguments, _ = rows.program_of(row, 1)
        shapes[name] = list(jax.eval_shape(function, *arguments).shape)
    told = {"program": "8p_GEMM", "chip": "v6e", "wall_ms": 5.358}
    times = [{**told, "device_ms": on} for on in (5.187, None)]
    return {
        "pages": float(apart(made, wanted)),
        "groups": float(apart([grouped[:1500]], [both])),
        "results": shapes,
        "times": [row["measured_seconds"] for row in jaxbench.rows({"rows": times})],
    }


def main() -> None:
    sys.path.insert(0, str(HERE))
    row = {"mode": "full", "half": "fit", "generation": "v6e", "kind": "k"}
    ran = ((-0.1, 3.0, 1), (0.2, 1.0, 1), (0.3, 1.0, 2))
    rows = [row | {"error": e, "measured_seconds": s, "runs": n} for e, s, n in ran]
    table = import_module("table").text(rows)
    keys = jax.random.split(jax.random.key(0), 6)
    numbers = {
        **jax.jit(partial(of_attention, import_module("attention")))(keys),
        **jax.jit(partial(of_losses, import_module("losses")))(keys),
    }
    found = {
        **{name: float(value) for name, value in numbers.items()},
        **of_rows(import_module("rows")),
        **of_grouped(import_module("rows"), import_module("grouped")),
        "traced": of_traced(
            import_module("traced"),
            import_module("systolic.sim.work"),
            import_module("systolic.sim.estimate"),
        ),
        **of_jaxbench(import_module("jaxbench"), import_module("rows")),
        "table": table.splitlines()[-1],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
