"""Checkpoints in one process: bit for bit, damage found, the right ones kept."""

import json
import shutil
import typing
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from systolic.core.errors import NotFoundError, RunError
from systolic.job import Mode
from systolic.runs import Access, CheckpointStore, manifest


class State(typing.NamedTuple):
    step: jax.Array
    params: typing.Any
    opt: typing.Any
    ema: typing.Any
    rng: jax.Array


def state(step: int = 1) -> State:
    params = {
        "layers": [{"kernel": jnp.full((4, 3), step, jnp.float32)}, {"bias": jnp.float32(-0.0)}],
        "empty": {},
        "bf16": jnp.array([jnp.nan, jnp.inf, -0.0, 1e-40], jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    return State(
        step=jnp.int32(step),
        params=params,
        opt=optimizer.init(params),
        ema=None,
        rng=jax.random.split(jax.random.key(step, impl="rbg"), 2),
    )


def abstract(tree: typing.Any) -> typing.Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def same(got: typing.Any, want: typing.Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(a) == jax.random.key_impl(b)
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved(folder: Path, *steps: int, of: int | None = None) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last=10)
    for step in steps:
        store.save(step, state(of or step), extra={"step": step})
    store.wait()
    return store


def test_everything_comes_back_bit_for_bit(tmp_path: Path):
    extra = {"position": b"\0\xff", "rng": 2**100, "nested": {"a": [1, None, "ä"]}}
    with CheckpointStore(tmp_path) as store:
        assert store.save(3, state(3), extra=extra, metrics={"loss": 0.5, "bad": float("nan")})
        done = store.wait()
        assert done is not None
        assert (done.step, done.path) == (3, tmp_path / "3")
        assert done.num_bytes > 0
        assert store.wait() is None
        restored = store.restore(abstract(state(3)))
    assert (restored.step, list(restored.skipped)) == (3, [])
    assert restored.extra == extra
    assert restored.metrics == {"loss": 0.5}
    same(restored.state, state(3))


DTYPES = [
    *("bool", "int4", "int8", "uint8", "int16", "int32", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "complex64"),
]


@given(data=st.data())
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_tree_comes_back(tmp_path: Path, data: st.DataObject):
    names = st.text(min_size=1, max_size=8).filter(lambda s: s.isprintable())

    def arrays() -> st.SearchStrategy:
        return st.builds(
            lambda dtype, shape, seed: jax.device_put(
                np.random.default_rng(seed).integers(-128, 128, shape).astype(jnp.dtype(dtype))
            ),
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.integers(0, 99),
        )

    leaves = st.one_of(st.none(), arrays())
    trees = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(names, inner, max_size=3),
        ),
        max_leaves=6,
    )
    # Three a checkpoint: opening and closing one takes longer than its arrays.
    tree = data.draw(st.lists(trees, min_size=3, max_size=3).filter(lambda t: jax.tree.leaves(t)))
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    with CheckpointStore(tmp_path / "any") as store:
        store.save(1, tree)
        same(store.restore(abstract(tree)).state, tree)


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path):
    overwrite = jax.jit(lambda x: x * 0 + 7, donate_argnums=0)
    values = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            array = jax.device_put(values)
            store.save(step, {"params": {"w": array}})
            overwrite(array).block_until_ready()
        restored = store.restore({"params": {"w": jax.ShapeDtypeStruct((512, 1024), "float32")}})
    np.testing.assert_array_equal(restored.state["params"]["w"], values)


def test_only_a_part_is_read(tmp_path: Path):
    with saved(tmp_path, 1):
        shutil.rmtree(tmp_path / "1" / "opt")
    with CheckpointStore(tmp_path, access=Access.read) as store:
        whole = abstract(state(1))
        restored = store.restore(whole, only=("params",))
        same(restored.state.params, state(1).params)
        assert restored.state.opt == whole.opt
        assert restored.extra == {"step": 1}
        part = store.restore({"params": whole.params}, only=("params",)).state
        same(part, {"params": state(1).params})
        with pytest.raises(RunError, match=r"is intact \(step 1: opt/.* is missing\)"):
            store.restore(whole)


def test_another_model_is_named_by_its_first_difference(tmp_path: Path):
    want = abstract(state(1))
    wider = want.params | {"layers": [{"kernel": jax.ShapeDtypeStruct((4, 5), "float32")}, {}]}
    more = want.params | {"zzz": jax.ShapeDtypeStruct((2,), "int8")}
    fewer = {name: leaf for name, leaf in want.params.items() if name != "bf16"}
    cast = want.params | {"bf16": jax.ShapeDtypeStruct((4,), "float32")}
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    with saved(tmp_path, 1) as store:
        for other, told in [
            (
                want._replace(params=wider),
                "params/layers/0/kernel is float32[4,3] in the checkpoint and float32[4,5] in this job",
            ),
            (
                want._replace(params=more),
                "params/zzz is absent in the checkpoint and int8[2] in this job",
            ),
            (
                want._replace(params=fewer),
                "params/bf16 is bfloat16[4] in the checkpoint and absent in this job",
            ),
            (
                want._replace(params=cast),
                "params/bf16 is bfloat16[4] in the checkpoint and float32[4] in this job",
            ),
            (
                want._replace(rng=key),
                "rng is key<rbg>[2] in the checkpoint and key<threefry2x32>[2] in this job",
            ),
        ]:
            with pytest.raises(RunError) as caught:
                store.restore(other)
            assert told in str(caught.value)
            assert "\n" not in str(caught.value)


def files(folder: Path) -> list[Path]:
    """Every file that a restore depends on."""
    ignored = {"_CHECKPOINT_METADATA", "commit_success.txt"}
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not (path.parent == folder and path.name in ignored)
    )


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [remove, cut, flip])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, damage: Callable[[Path], None]):
    """A copy of the checkpoint for each file, damaged in that file: one restore passes over all of them."""
    with saved(tmp_path, 1):
        pass
    names = [path.relative_to(tmp_path / "1") for path in files(tmp_path / "1")]
    assert len(names) > 15
    damaged: dict[int, Path] = {}
    for step, name in enumerate(names, 2):
        if (tmp_path / "1" / name).stat().st_size or damage is remove:
            shutil.copytree(tmp_path / "1", tmp_path / str(step))
            damage(tmp_path / str(step) / name)
            damaged[step] = name
    with CheckpointStore(tmp_path) as store:
        restored = store.restore(abstract(state(1)))
    assert restored.step == 1
    assert restored.extra == {"step": 1}
    assert [step for step, _ in restored.skipped] == sorted(damaged, reverse=True)
    for step, reason in restored.skipped:
        assert str(damaged[step]) in reason
    same(restored.state, state(1))


def test_what_a_restore_does_not_read_may_change(tmp_path: Path):
    with saved(tmp_path, 1):
        (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("{")
        (tmp_path / "1" / "commit_success.txt").unlink()
        (tmp_path / "1" / "note.txt").write_text("the good one")
        (tmp_path / "notes").mkdir()
    with CheckpointStore(tmp_path) as store:
        assert store.restore(abstract(state(1))).step == 1
        store.save(2, state(2))
        store.wait()
        assert store.steps() == [1, 2]


def test_nothing_to_restore(tmp_path: Path):
    want = abstract(state(1))
    with CheckpointStore(tmp_path / "none") as store:
        assert (store.steps(), store.latest_step(), store.best_step()) == ([], None, None)
        with pytest.raises(NotFoundError, match="holds no checkpoint; train a few steps first"):
            store.restore(want)
    assert not (tmp_path / "none").exists()
    with saved(tmp_path, 1, 2) as store:
        with pytest.raises(NotFoundError, match=r"no checkpoint of step 3 in .*; there are 1, 2"):
            store.restore(want, step=3)
        with pytest.raises(NotFoundError, match="has the metric None"):
            store.restore(want, step="best")
        cut(tmp_path / "2" / "manifest.json")
        with pytest.raises(
            RunError, match=r"step 2 is damaged \(manifest.json is damaged\); choose another of 1"
        ):
            store.restore(want, step=2)
        remove(tmp_path / "1" / "manifest.json")
        told = r"is intact \(step 2: manifest.json is damaged; step 1: manifest.json is missing\)"
        with pytest.raises(RunError, match=told):
            store.restore(want)


def test_a_checkpoint_of_another_writer_is_not_taken_for_ours(tmp_path: Path):
    import orbax.checkpoint as ocp

    with saved(tmp_path, 1):
        pass
    with ocp.StandardCheckpointer() as other:
        other.save(tmp_path / "7", {"params": {"w": jnp.ones(3)}})
    with CheckpointStore(tmp_path) as store:
        assert store.steps() == [1]
        restored = store.restore(abstract(state(1)))
    assert (restored.step, restored.skipped) == (1, ((7, "manifest.json is missing"),))


def test_other_tools_read_a_part(tmp_path: Path):
    import orbax.checkpoint as ocp

    with saved(tmp_path, 1), ocp.PyTreeCheckpointer() as reader:
        args = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
            {"layers": {"0": {"kernel": 0}, "1": {"bias": 0}}, "bf16": 0},
        )
        found = reader.restore(tmp_path / "1" / "params", restore_args=args)
    np.testing.assert_array_equal(found["layers"]["0"]["kernel"], np.ones((4, 3)))


@pytest.mark.parametrize(
    ("mode", "kept", "best"), [(Mode.min, [2, 5, 6], 2), (Mode.max, [3, 5, 6], 3)]
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, mode: Mode, kept: list[int], best: int):
    losses = {1: 2.0, 2: 1.0, 3: 9.0, 4: 2.0, 5: float("nan"), 6: 2.0}
    half = {"keep_last": 2, "keep_best": 1, "metric": "loss", "mode": mode}
    for steps in ((1, 2, 3), (4, 5, 6)):  # A resume between: what is best is read from disk.
        with CheckpointStore(tmp_path, **half) as store:
            for step in steps:
                store.save(step, {"w": jnp.full(2, step)}, metrics={"loss": losses[step]})
    with CheckpointStore(tmp_path, **half) as store:
        assert store.steps() == kept
        assert (store.best_step(), store.latest_step()) == (best, 6)
        assert store.metrics(best) == {"loss": losses[best]}
        want = {"w": jax.ShapeDtypeStruct((2,), "int32")}
        assert store.restore(want, step="best").step == best
        flip(tmp_path / str(best) / "_leaves" / "manifest.ocdbt")
        fallen = store.restore(want, step="best")
        assert [step for step, _ in fallen.skipped] == [best]
        assert fallen.step == 6


@pytest.mark.parametrize("name", ["_leaves/manifest.ocdbt", "manifest.json"])
def test_a_damaged_best_gives_way_to_a_checkpoint_that_was_never_ranked(tmp_path: Path, name: str):
    want = {"w": jax.ShapeDtypeStruct((2,), "int32")}
    with CheckpointStore(tmp_path, keep_last=3, metric="loss") as store:
        for step, metrics in ((1, {}), (2, {}), (3, {"loss": 1.0})):
            store.save(step, {"w": jnp.full(2, step)}, metrics=metrics)
        store.save(4, {"w": jnp.full(2, 4)}, metrics={"loss": 0.5})
        store.wait()
        shutil.rmtree(tmp_path / "3")
        flip(tmp_path / "4" / name)
    with CheckpointStore(tmp_path, metric="loss", access=Access.read) as store:
        if name == "manifest.json":
            assert store.best_step() is None
            restored = store.restore(want)
        else:
            restored = store.restore(want, step="best")
        assert restored.step == 2
        assert [step for step, _ in restored.skipped] == [4]
        np.testing.assert_array_equal(restored.state["w"], np.full(2, 2))


def test_a_checkpoint_whose_rank_cannot_be_read_is_named(tmp_path: Path):
    want = {"w": jax.ShapeDtypeStruct((2,), "int32")}
    with CheckpointStore(tmp_path, metric="loss") as store:
        for step in (1, 2):
            store.save(step, {"w": jnp.full(2, step)}, metrics={"loss": 1.0 / step})
        store.wait()
    cut(tmp_path / "2" / "manifest.json")
    with CheckpointStore(tmp_path, metric="loss", access=Access.read) as store:
        restored = store.restore(want, step="best")
    assert (restored.step, restored.skipped) == (1, ((2, "manifest.json is damaged"),))


def test_without_metrics_only_the_newest_are_kept(tmp_path: Path):
    with CheckpointStore(tmp_path, keep_last=1, metric="loss") as store:
        for step in range(1, 5):
            store.save(step, {"w": jnp.ones(2)})
        store.wait()
        assert store.steps() == [4]


def test_poll_tells_of_each_commit_once(tmp_path: Path):
    with CheckpointStore(tmp_path) as store:
        assert store.poll() is None
        assert store.save(1, {"w": jnp.ones(2)})
        assert store.save(2, {"w": jnp.ones(2)})
        seen = []
        while len(seen) < 2:
            done = store.poll()
            seen += [] if done is None else [done.step]
        assert seen == [1, 2]
        assert store.poll() is None
        assert not store.save(2, {"w": jnp.zeros(2)}), "a step is written once"
        with pytest.raises(TypeError, match=r"params/w is ndarray, not a jax.Array"):
            store.save(3, {"params": {"w": np.ones(2)}})
        want = {"w": jax.ShapeDtypeStruct((2,), "float32")}
        np.testing.assert_array_equal(store.restore(want).state["w"], np.ones(2))


def test_going_on_from_an_earlier_step(tmp_path: Path):
    with saved(tmp_path, 1, 2, 3, 4):
        pass
    flip(tmp_path / "4" / "manifest.json")
    want = abstract(state(1))
    with CheckpointStore(tmp_path, keep_last=10) as store:
        restored = store.restore(want, step=2)
        assert store.discard_after(restored.step) == [3, 4]
        assert store.steps() == [1, 2]
        assert (tmp_path / "damaged" / "4" / "manifest.json").exists()
        assert not (tmp_path / "damaged" / "3").exists()
        store.save(3, state(30), extra={"step": 30})
        store.wait()
        assert store.restore(want).extra == {"step": 30}
    with CheckpointStore(tmp_path, keep_last=10) as store:
        assert store.save(3, state(31), extra={"step": 31}), "an earlier process's step is replaced"
        assert store.restore(want).extra == {"step": 31}
        same(store.restore(want).state, state(31))


def test_what_a_kill_left_of_a_replacement(tmp_path: Path):
    """With the new one whole it counts, else the old one does; nothing else is left."""
    want = abstract(state(1))
    for whole in (True, False):
        with saved(tmp_path, 1), saved(tmp_path / "replacing", 1, of=9):
            pass
        (tmp_path / "replaced").mkdir()
        (tmp_path / "1").rename(tmp_path / "replaced" / "1")
        if not whole:
            (tmp_path / "replacing" / "1" / manifest.NAME).unlink()
        with CheckpointStore(tmp_path, access=Access.read) as reader:
            assert reader.steps() == []
        with CheckpointStore(tmp_path) as store:
            same(store.restore(want).state, state(9 if whole else 1))
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        shutil.rmtree(tmp_path / "1")


def test_metrics_that_come_after_the_save(tmp_path: Path):
    rule = {"keep_last": 1, "keep_best": 1, "metric": "loss"}
    with CheckpointStore(tmp_path, **rule) as store:
        for step, loss in ((1, 1.0), (2, 2.0)):
            store.save(step, state(step), metrics={"loss": loss})
        store.save(3, state(3))
        store.wait()
        assert store.steps() == [1, 3]
        store.rate(3, {"loss": 0.5, "accuracy": float("nan")})
        assert store.steps() == [3], "the best before is so no more"
        assert store.save(4, state(4)), "and saves go on"
    with CheckpointStore(tmp_path, **rule) as store:
        assert (store.steps(), store.best_step()) == ([3, 4], 3)
        assert store.metrics(3) == {"loss": 0.5}
        same(store.restore(abstract(state(1)), step="best").state, state(3))
        with pytest.raises(NotFoundError, match=r"manifest.json is missing"):
            store.rate(7, {"loss": 0.1})


def test_a_reader_changes_nothing(tmp_path: Path):
    with saved(tmp_path, 1):
        scratch = tmp_path / "2.orbax-checkpoint-tmp"
        scratch.mkdir()
        with CheckpointStore(tmp_path, access=Access.read) as reader:
            assert reader.restore(abstract(state(1))).step == 1
            with pytest.raises(RunError, match="open for reading"):
                reader.save(2, state(2))
        assert scratch.exists()
    with CheckpointStore(tmp_path):
        assert not scratch.exists()


def test_a_store_keeps_at_least_one(tmp_path: Path):
    with pytest.raises(RunError, match="keep-last is 0"):
        CheckpointStore(tmp_path, keep_last=0)


def test_a_manifest_guards_itself(tmp_path: Path):
    with saved(tmp_path, 1):
        path = tmp_path / "1" / manifest.NAME
        plain = json.loads(path.read_text())
        plain["leaves"][0][2] = [99]
        path.write_text(json.dumps(plain))
        with pytest.raises(manifest.DamagedError, match=r"manifest.json is damaged"):
            manifest.read(tmp_path / "1")


def test_paths_that_cannot_be_told_apart_are_refused(tmp_path: Path):
    class Odd(typing.NamedTuple):
        a: typing.Any

    with CheckpointStore(tmp_path) as store, pytest.raises(ValueError, match="the path a/1"):
        store.save(1, Odd(a=_Twins(jnp.ones(1), jnp.ones(2))))


@jax.tree_util.register_pytree_with_keys_class
class _Twins:
    """Two children under one name."""

    def __init__(self, one: typing.Any, two: typing.Any) -> None:
        self.pair = (one, two)

    def tree_flatten_with_keys(self) -> tuple:
        one, two = self.pair
        return ((jax.tree_util.DictKey(1), one), (jax.tree_util.DictKey("1"), two)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> "_Twins":
        return cls(*children)
