"""``systolic explain`` and ``systolic plan`` of a program that is started, with the real compiler."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from systolic.chips import slice
from systolic.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]
TRAINER = [sys.executable, str(ROOT / "examples/plain_trainer.py"), "--layers", "2"]


def test_explain_names_causes_by_the_mesh_of_the_program(capsys, tmp_path: Path) -> None:
    assert main(["explain", "--on", "v5e-8", "--json", "--", *TRAINER]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["program"], made["slice"], made["quick"]) == ("train_step", "v5e-8", True)
    causes = {one["name"]: one for one in made["causes"]}
    assert "exposed-collectives-data" in causes  # the axis that the program's own mesh has
    assert causes["exposed-collectives-data"]["advice"]
    shares = [one["share"] for one in made["causes"]]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < share <= 1 for share in shares)
    text = json.dumps(made["causes"])
    assert "--layout" not in text  # no option of ours is one of this program
    assert "plain_trainer.py" in text


@pytest.mark.slow
def test_explain_of_a_dump_says_what_it_says_of_the_program(capsys, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ["--on", "v5e-8", "--json"]
    assert main(["forecast", *words, "--quick", "--keep", str(kept), "--", *TRAINER]) == 0
    capsys.readouterr()
    assert main(["explain", str(kept / "program0.txt"), *words]) == 0
    of_dump = json.loads(capsys.readouterr().out)
    assert main(["explain", *words, "--", *TRAINER]) == 0
    of_program = json.loads(capsys.readouterr().out)
    seconds = [
        {one["name"].split("-data")[0].split("-other")[0]: one["seconds"] for one in made["causes"]}
        for made in (of_dump, of_program)
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert main(["explain", str(kept / "program0.txt"), "--on", "v5e-8"]) == 0
    assert "problems found" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_explains_and_plans_its_example(capsys, monkeypatch) -> None:
    page = (ROOT / "docs/your-own-program.md").read_text()
    lines = re.findall(r"^systolic ((?:explain|plan) .*plain_trainer.*)$", page, re.MULTILINE)
    assert len(lines) == 2
    monkeypatch.chdir(ROOT)
    for line in lines:
        words = [sys.executable if word == "python" else word for word in shlex.split(line)]
        assert main(words) == 0
    shown = capsys.readouterr().out
    assert "problems found" in shown
    assert all(name in shown for name in ("2xv5e-8", "cheapest", "fastest"))


def test_plan_ranks_slices_by_the_same_work(capsys, tmp_path: Path) -> None:
    # Each device has four examples: a step on sixteen does twice the work of one on eight.
    program = tmp_path / "train.py"
    text = (ROOT / "examples/plain_trainer.py").read_text()
    assert '"--batch", type=int, default=32' in text
    program.write_text(text.replace("default=32", "default=4 * jax.device_count()"))
    table = tmp_path / "table.csv"
    words = ["plan", "--on", "v5e-16,v5e-8", "--csv", str(table)]
    command = [sys.executable, str(program), "--layers", "2"]
    assert main([*words, "--json", "--", *command]) == 0
    made = json.loads(capsys.readouterr().out)
    by_slice = {one["slice"]: one for one in made["candidates"]}
    large, small = by_slice["v5e-16"], by_slice["v5e-8"]
    assert "0.5 on v5e-8" in made["notes"][0]
    assert large["steps_per_second"] == pytest.approx(1 / large["step_seconds"])
    assert small["steps_per_second"] == pytest.approx(0.5 / small["step_seconds"], rel=0.02)
    hourly = slice("v5e-8").usd_per_hour.on_demand
    assert hourly is not None
    usd = hourly * 1e6 / small["steps_per_second"] / 3600
    assert small["usd_per_million_steps"] == pytest.approx(usd)
    assert made["best"] == made["cheapest"] == made["candidates"][0]["slice"]
    assert made["fastest"] == "v5e-16"
    assert table.read_text().startswith("slice,chips,")


SAME_BATCH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n, width, rows = jax.device_count(), 2048, 1024
mesh, turns = Mesh(np.array(jax.devices()), ("d",)), 32 // jax.device_count()
def local(w, x):
    def body(carry):
        i, g = carry
        xi = jax.lax.dynamic_slice_in_dim(x, i * rows, rows, 0)
        return i + 1, g + jax.grad(lambda w: jnp.sum(jnp.tanh(xi @ w).astype(jnp.float32)))(w)
    g = jax.lax.while_loop(lambda carry: carry[0] < turns, body, (0, jnp.zeros_like(w)))[1]
    return w - jax.lax.psum(g, "d") * jnp.bfloat16(0.1)
step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False))
w = jax.device_put(jnp.ones((width, width), jnp.bfloat16), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((32 * rows, width), jnp.bfloat16), NamedSharding(mesh, P("d")))
for _ in range(60):
    w = step(w, x)
"""
"""A fixed global batch: each device loops over its micro-batches, fewer of them on a larger slice."""

TWO_PROGRAMS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n, width = jax.device_count(), 1024
mesh = Mesh(np.array(jax.devices()), ("d",))
@jax.jit
def grad(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(PRODUCT).astype(jnp.float32)))(w)
@jax.jit
def update(w, g):
    return w - g * jnp.bfloat16(0.1)
w = jax.device_put(jnp.ones((width, width), jnp.bfloat16), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((n * 4096, width), jnp.bfloat16), NamedSharding(mesh, P("d")))
for _ in range(60):
    w = update(w, grad(w, x))
"""
"""A batch that follows the devices, and an update without matmuls that is a program of its own."""


AHEAD = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n, width = jax.device_count(), 1024
mesh = Mesh(np.array(jax.devices()), ("d",))
def step(w, x):
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)))(w)
w = jax.device_put(jnp.ones((width, width), jnp.bfloat16), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((n * 4096, width), jnp.bfloat16), NamedSharding(mesh, P("d")))
compiled = jax.jit(step).lower(w, x).compile()
for _ in range(60):
    w = compiled(w, x)
"""
"""A batch that follows the devices, and a step that the program lowers and compiles itself."""


def planned(text: str, on: str, folder: Path, capsys) -> dict:
    """JSON of ``systolic plan`` of a program."""
    program = folder / "train.py"
    program.write_text(text)
    assert main(["plan", "--on", on, "--json", "--", sys.executable, str(program)]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_counts_the_trips_of_loops(capsys, tmp_path: Path) -> None:
    made = planned(SAME_BATCH, "v5e-1,v5e-8", tmp_path, capsys)
    by_slice = {one["slice"]: one for one in made["candidates"]}
    assert made["notes"] == []  # the same work on both
    for name, one in by_slice.items():
        hourly = slice(name).usd_per_hour.on_demand
        assert hourly is not None
        assert one["steps_per_second"] == pytest.approx(1 / one["step_seconds"])
        usd = hourly * 1e6 * one["step_seconds"] / 3600
        assert one["usd_per_million_steps"] == pytest.approx(usd)
    # Two matmuls of 32 x 1024 rows at v5e's 197 TFLOP/s are the least that one device takes.
    least = 2 * 2 * 32 * 1024 * 2048**2 / 197e12
    assert least < by_slice["v5e-1"]["step_seconds"] < 1.5 * least
    assert (made["best"], made["cheapest"], made["fastest"]) == ("v5e-1", "v5e-1", "v5e-8")


@pytest.mark.slow
def test_plan_sums_the_work_of_programs_with_and_without_matmuls(capsys, tmp_path: Path) -> None:
    text = TWO_PROGRAMS.replace("PRODUCT", "x @ w")
    made = planned(text, "v5e-1,v5e-8", tmp_path, capsys)
    assert len(made["notes"]) == 1
    assert "by FLOPs, it is 8 on v5e-8" in made["notes"][0]
    large = next(one for one in made["candidates"] if one["slice"] == "v5e-8")
    assert large["steps_per_second"] == pytest.approx(8 / large["step_seconds"])
    assert made["fastest"] == "v5e-8"


@pytest.mark.slow
def test_plan_knows_the_work_of_a_program_that_is_compiled_ahead(capsys, tmp_path: Path) -> None:
    made = planned(AHEAD, "v5e-1,v5e-8", tmp_path, capsys)
    # What is compiled ahead is known as it is written, too.
    assert "by FLOPs, it is 8 on v5e-8" in made["notes"][0]
    assert made["fastest"] == "v5e-8"


def hook_flops() -> ModuleType:
    """The module of what runs inside of a captured program."""
    where = ROOT / "src/systolic/capture/hook/systolic_capture/flops.py"
    spec = importlib.util.spec_from_file_location("flops", where)
    assert spec is not None
    assert spec.loader is not None
    flops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flops)
    return flops


def test_work_of_loops_and_kernels_by_hand() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    flops = hook_flops()

    def kernel(a, b, c) -> None:
        c[...] = a[...] @ b[...]

    def product(x, rows=4):
        return pl.pallas_call(
            kernel,
            grid=(rows, 2),
            in_specs=[
                pl.BlockSpec((64, 256), lambda i, j: (i, 0)),
                pl.BlockSpec((256, 128), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((64, 128), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((256, 256), x.dtype),
        )(x, x)

    def open_loop(x):
        return jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ y, x)

    one = 2 * 256**3
    x = jnp.ones((256, 256))
    for function, times, is_least in (
        (lambda x: x @ x, 1, False),
        (product, 1, False),  # eight blocks
        (lambda x: product(x, x[0, 0].astype(int)), 1 / 4, True),  # rows of blocks by data
        (lambda x: jax.lax.fori_loop(0, 5, lambda _, y: y @ y, x), 5, False),
        (open_loop, 1, True),
        (jax.jit(open_loop), 1, True),
        (lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y + 1, x) @ x, 1, False),
    ):
        jaxpr = jax.make_jaxpr(function)(x).jaxpr
        assert flops.of_jaxpr(jaxpr) == times * one
        assert flops.in_open_loops(jaxpr) == is_least

    def nested(x):
        def outer(c):
            y = jax.lax.scan(lambda z, _: (open_loop(z @ z), None), c[1], None, length=3)[0]
            return c[0] + 1, y

        return jax.lax.while_loop(lambda c: c[0] < 7, outer, (0, x))[1] @ x

    (loop,) = flops.open_loops(jax.make_jaxpr(nested)(x).jaxpr)
    (inner,) = loop["loops"]
    assert (loop["times"], loop["flops"]) == (1, 3 * one)
    assert (inner["times"], inner["flops"], inner["loops"]) == (3, one, [])
    assert [name.split(":")[0] for name in (loop["source"], inner["source"])] == 2 * [
        Path(__file__).name
    ]
    assert loop["source"] != inner["source"]


def test_a_matmul_that_devices_of_a_shard_map_repeat_counts_once() -> None:
    """Eight devices along two axes, the rows over four: pairs compute the same."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, AxisType
    from jax.sharding import PartitionSpec as P

    flops = hook_flops()
    mesh = AbstractMesh((4, 2), ("rows", "same"), axis_types=(AxisType.Auto,) * 2)
    x, w = jnp.ones((256, 256)), jnp.ones((256, 256))
    for spec in (P("rows"), P(), P(("rows", "same"))):
        mapped = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
        assert flops.of_jaxpr(jax.make_jaxpr(mapped)(x, w).jaxpr) == 2 * 256**3
    # Where the program does not say which devices differ, each counts.
    mapped = jax.shard_map(
        lambda a, b: a @ b, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    assert flops.of_jaxpr(jax.make_jaxpr(mapped)(x, w).jaxpr) == 8 * 2 * 256**3


@pytest.mark.slow
def test_plan_ranks_none_where_no_work_is_known(capsys, tmp_path: Path) -> None:
    text = TWO_PROGRAMS.replace("PRODUCT", "x * jnp.sum(w, 0)")
    made = planned(text, "v5e-8,v5e-1", tmp_path, capsys)
    assert [one["slice"] for one in made["candidates"]] == ["v5e-8", "v5e-1"]  # as given
    assert (made["best"], made["cheapest"], made["fastest"]) == (None, None, None)
    assert "not known on v5e-8, v5e-1" in made["notes"][0]
    assert "can't be compared" in made["notes"][0]


@pytest.mark.slow
def test_plan_lists_slices_where_the_program_fails(capsys, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    text = (ROOT / "examples/plain_trainer.py").read_text()
    program.write_text(
        text.replace(
            "mesh = Mesh", "assert len(jax.devices()) < 16, 'too many devices'\nmesh = Mesh"
        )
    )
    words = ["plan", "--on", "v5e-16,v5e-8,v5e-1", "--goal", "time"]
    assert main([*words, "--", sys.executable, str(program), "--layers", "2"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[2].startswith("v5e-8 ")
    assert "fastest" in lines[2]
    assert lines[4].startswith("v5e-16")
    assert "AssertionError: too many devices" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["explain", "lm", "--on", "v5e-8", "--"], "lm is explained, or the program behind --"),
        (["explain", "--on", "v5e-8,v5e-16", "--", "python"], "systolic plan --on v5e-8,v5e-16"),
        (["forecast", "--on", "v5e-8,v5e-16", "--", "python"], "systolic plan --on v5e-8,v5e-16"),
        (["plan", "--on", "v5e-8", "--goal", "energy", "--", "python"], "rank by cost or time"),
        (["plan", "--on", "v5e-8,8xl4", "--", "false"], "has no description for its compiler"),
        (["plan", "--on", "v5e-8", "--", "no-such-python"], "there is no command 'no-such-pyth"),
    ],
)
def test_lines_that_are_refused(words: list[str], says: str, capsys) -> None:
    assert main(words) != 0
    told = capsys.readouterr()
    assert says in " ".join((told.err + told.out).split())


REPEATED = """import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("d",))

@jax.jit
def step(w, x):
    v = jnp.tanh(w @ w) @ w  # on each device: 2 x 2 x 1024^3
    def body(c):
        return c[0] + 1, jnp.tanh(c[1] @ v)  # over the devices: 2 x 2048 x 1024^2 a trip
    return w, jax.lax.while_loop(lambda c: c[0] < 10, body, (0, x))[1]

w = jax.device_put(jnp.ones((1024, 1024), jnp.bfloat16), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((2048, 1024), jnp.bfloat16), NamedSharding(mesh, P("d")))
for _ in range(10):
    w, x = step(w, x)
"""


@pytest.mark.slow
def test_a_repeated_matmul_counts_once_beside_a_loop_with_its_trips(capsys, tmp_path: Path) -> None:
    """The step does the same on one device and on four, though four execute the matmul of the weights four times."""
    program = tmp_path / "train.py"
    program.write_text(REPEATED)
    words = ["plan", "--on", "v6e-1,v6e-4", "--json", "--", sys.executable, str(program)]
    assert main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert not any("work follows the slice" in note for note in made["notes"])
    one, four = sorted(made["candidates"], key=lambda row: row["chips"])
    for row in (one, four):
        # HFU counts what each chip executes: the weights' matmul on all, the loop's tenth turn by turn.
        executed = row["chips"] * 4 * 1024**3 + 10 * 2 * 2048 * 1024**2
        assert row["hfu"] == pytest.approx(
            executed / (row["chips"] * 918e12 * row["step_seconds"]), rel=0.01
        )
        assert row["steps_per_second"] == pytest.approx(1 / row["step_seconds"])
