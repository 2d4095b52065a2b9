from pathlib import Path

import gguf
import numpy as np
import pytest

from systolic.core.errors import DataError
from systolic.formats.gguf.reader import GgufHeader
from systolic.formats.source import open_source


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a field of every kind, and tensors of three."""
    path = tmp_path / "model.gguf"
    out = gguf.GGUFWriter(path, "llama")
    out.add_uint8("a.u8", 200)
    out.add_int8("a.i8", -3)
    out.add_uint16("a.u16", 60_000)
    out.add_int16("a.i16", -300)
    out.add_uint32("a.u32", 1 << 31)
    out.add_int32("a.i32", -5)
    out.add_uint64("a.u64", 1 << 63)
    out.add_int64("a.i64", -(1 << 40))
    out.add_float32("a.f32", 0.1)
    out.add_float64("a.f64", 0.1)
    out.add_bool("a.bool", True)
    out.add_string("a.text", "Grüße")
    out.add_array("a.texts", ["one", "", "日本"])
    out.add_array("a.numbers", [1, -2, 3])
    out.add_array("a.reals", [0.5, 1.5])
    out.add_array("a.switches", [True, False])
    rows = np.arange(96, dtype=np.float32).reshape(3, 32)
    out.add_tensor("plain", rows)
    out.add_tensor("half", rows[:2].astype(np.float16))
    packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    out.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_header_is_what_the_package_gguf_reads(file: Path) -> None:
    header, known = GgufHeader.of(file), gguf.GGUFReader(file)
    fields = {
        name: field.contents()
        for name, field in known.fields.items()
        if not name.startswith("GGUF.")
    }
    assert dict(header.fields) == fields
    assert list(header.tensors) == [one.name for one in known.tensors]
    for one in known.tensors:
        place = header.tensors[one.name]
        assert place.shape == tuple(int(size) for size in one.shape[::-1])
        assert (place.kind, place.offset, place.bytes) == (
            one.tensor_type,
            int(one.data_offset),
            int(one.n_bytes),
        )


def test_a_file_cut_anywhere_is_refused_in_a_line(file: Path) -> None:
    content = file.read_bytes()
    for size in (0, 3, 4, 11, 24, 40, 200, len(content) // 2, len(content) - 33):
        file.write_bytes(content[:size])
        with pytest.raises(DataError, match="no intact GGUF file"):
            open_source(file)


def test_another_version_and_sizes_beyond_the_file_are_refused(file: Path) -> None:
    content = file.read_bytes()
    kind = content.index(b"plain") + len("plain") + 4 + 2 * 8
    for place, value, says in (
        (4, b"\x09", "version 9"),
        (16, b"\xff" * 8, ""),
        (24, b"\xff" * 8, "ends within"),
        (33, b"\xff", r"damaged at byte 33: text there is not UTF-8"),
        (kind, b"\xee", f"plain is of the unknown kind 238, at byte {kind:,}"),
    ):
        file.write_bytes(content[:place] + value + content[place + len(value) :])
        with pytest.raises(DataError, match=f"no intact GGUF file .*{says}"):
            open_source(file)
