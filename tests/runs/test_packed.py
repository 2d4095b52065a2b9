"""Codes of 4 bits in files, two to a byte."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from systolic.core.errors import DataError
from systolic.job import MatrixFormat, WeightFormat
from systolic.models.quantized.codes import quantized
from systolic.runs.bundle.record import QuantizedRecord, RestoredTensor, packed, unpacked, views
from systolic.runs.bundle.tensors import TensorSpec, read_header, write

INT4 = MatrixFormat(format=WeightFormat.int4, group=2)


@pytest.mark.parametrize("columns", [1, 4, 5])
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_codes_come_back(dtype: type, columns: int) -> None:
    low = int(ml_dtypes.iinfo(dtype).min)
    codes = (np.arange(3 * columns).reshape(3, columns) * 7 % 16 + low).astype(dtype)
    raw = packed(codes)
    assert (raw.dtype, raw.shape) == (np.uint8, (3, -(-columns // 2)))
    np.testing.assert_array_equal(unpacked(raw, columns, np.dtype(dtype)), codes)


def test_a_bundle_is_described_without_jax() -> None:
    code = "import sys, systolic.runs.bundle.folder; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_even_place_is_the_low_half() -> None:
    assert packed(np.array([[1, -1]], ml_dtypes.int4)).tolist() == [[0xF1]]


def stored(
    path: Path, shape: tuple[int, ...] = (3, 4, 5), how: MatrixFormat = INT4
) -> tuple[np.ndarray, QuantizedRecord]:
    """A file with a stack of matrices, and what they restore to."""
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    made = quantized(jnp.asarray(value), (1,), how)
    tensors = {"m/codes": packed(np.asarray(made.codes)), "m/scales": np.asarray(made.scales)}
    specs = [TensorSpec(name=n, shape=a.shape, dtype=a.dtype) for n, a in tensors.items()]
    with path.open("wb") as out:
        write(out, specs, list(tensors.values()), {})
    record = QuantizedRecord.of(how, shape, np.dtype(np.float32))
    return np.asarray(made.restored(jnp.float32)), record


def test_a_matrix_is_read_in_codes_and_restored(tmp_path: Path) -> None:
    wanted, record = stored(tmp_path / "w.safetensors")
    plain, parts = views(read_header(tmp_path / "w.safetensors")[0], {"m": record}, "bundle.json")
    assert set(plain) == {"m"}
    restored, codes = plain["m"], parts["m/codes"]
    assert isinstance(restored, RestoredTensor)
    np.testing.assert_array_equal(restored.read(), wanted)
    np.testing.assert_array_equal(np.stack(list(restored.pieces())), wanted)
    cut = (slice(1, 3), slice(None), slice(1, 4))
    np.testing.assert_array_equal(restored.part(cut, np.dtype(np.float32)), wanted[cut])
    whole = codes.read()
    np.testing.assert_array_equal(codes.part(cut, np.dtype(ml_dtypes.int4)), whole[cut])


def test_an_embedding_with_a_scale_for_each_row_is_one_piece(tmp_path: Path) -> None:
    int8 = MatrixFormat(format=WeightFormat.int8)
    wanted, record = stored(tmp_path / "w.safetensors", (6, 4), int8)
    plain, _ = views(read_header(tmp_path / "w.safetensors")[0], {"m": record}, "bundle.json")
    restored = plain["m"]
    assert isinstance(restored, RestoredTensor)
    (piece,) = restored.pieces()
    np.testing.assert_array_equal(piece, wanted)
    cut = (slice(1, 3), slice(0, 2))
    np.testing.assert_array_equal(restored.part(cut, np.dtype(np.float32)), wanted[cut])


def test_a_record_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, record = stored(tmp_path / "w.safetensors")
    tensors = read_header(tmp_path / "w.safetensors")[0]
    wrong = QuantizedRecord("int4", 2, [3, 4, 9], "float32")
    with pytest.raises(DataError, match=r"m is int4 in groups of 2 of \(3, 4, 9\), and its codes"):
        views(tensors, {"m": wrong}, "bundle.json")
    with pytest.raises(DataError, match="says n is quantized, and its codes or scales are missing"):
        views(tensors, {"n": record}, "bundle.json")
    with pytest.raises(DataError, match="m in a format that is not known"):
        views(tensors, {"m": QuantizedRecord("int2", 2, [3, 4, 5], "float32")}, "bundle.json")


def test_factors_of_inputs_have_the_sizes_of_their_matrix_or_one(tmp_path: Path) -> None:
    shape, how = (3, 4, 5), MatrixFormat(format=WeightFormat.w8a8)
    record = QuantizedRecord.of(how, shape, np.dtype(np.float32))

    def read(factors: tuple[int, ...] | None) -> set[str]:
        sizes = {"m/codes": shape, "m/scales": (3, 1, 5), "m/inputs": factors}
        tensors = {
            name: np.ones(size, np.int8 if name == "m/codes" else np.float32)
            for name, size in sizes.items()
            if size is not None
        }
        specs = [TensorSpec(name=n, shape=a.shape, dtype=a.dtype) for n, a in tensors.items()]
        with (tmp_path / "w.safetensors").open("wb") as out:
            write(out, specs, list(tensors.values()), {})
        stored = read_header(tmp_path / "w.safetensors")[0]
        return set(views(stored, {"m": record}, "bundle.json")[1])

    for factors in ((3, 4, 1), (1, 4, 1)):
        assert read(factors) == {"m/codes", "m/scales", "m/inputs"}
    for factors in (None, (3, 2, 1), (4, 1)):
        with pytest.raises(DataError, match="and the factors of its inputs are missing or of anot"):
            read(factors)
