"""Hardware numbers stand in the catalogue or in the simulator's tables, and the check would see others."""

import dataclasses
from pathlib import Path

from systolic.chips import Chip
from tests.house.budget import ROOT
from tests.house.numbers import Number, numbers

FIELDS = frozenset(field.name for field in dataclasses.fields(Chip))

COUNTED = "operations of an algorithm, counted; the fitted rates scale them"
SEARCH = "no time or size of hardware: how far a search through the program goes, or what a note mentions"

ALLOWED: dict[str, str] = {
    "formats/onnx.py:MOST_BYTES": "the largest file of protobuf",
    "hlo/scalars.py:MOST_VALUES": SEARCH,
    "planning/analytic.py:ACCUMULATES": COUNTED,
    "planning/analytic.py:_FROZEN_BYTES": "bytes of an element, by format",
    "planning/analytic.py:_MOMENTS": "arrays of an optimizer, by its kind",
    "planning/analytic.py:HALF": "bytes of a bf16 element",
    "planning/analytic.py:LOGIT_BYTES": "bytes of elements, added up",
    "planning/analytic.py:WHOLE": "bytes of an f32 element",
    "planning/analytic.py:RESERVED": "room for rounding",
    "serving/batch/buckets.py:InputLimits": "pixels of a picture that is read",
    "sim/attention.py:_CAUSAL,_SEGMENTS,_SOFT_CAP": COUNTED,
    "sim/attention.py:_MATMULS": COUNTED,
    "sim/attention.py:_SEQUENCE_MINOR": "a layout's number, as the kernels have it",
    "sim/attention.py:_VECTOR_OPS": COUNTED,
    "sim/calls.py:STEPS": "steps that a schedule lays out",
    "sim/gpu.py:BACKWARD_KERNELS": COUNTED,
    "sim/gpu.py:BACKWARD_PRODUCTS": COUNTED,
    "sim/gpu_ops.py:_SCORES": "the layout of an array that cuDNN's attention keeps",
    "sim/grouped.py:_MASK_OPS": COUNTED,
    "sim/grouped.py:_SUM_OPS,_UNIT_OPS,_WIDEN_OPS": COUNTED,
    "sim/incomplete.py:_SECONDS": "units of time",
    "sim/attention.py:_STEPS": SEARCH,
    "sim/roofline.py:_LEAST_BYTES": SEARCH,
    "sim/simulate.py:MUCH": SEARCH,
    "sim/network.py:_ROUNDS": COUNTED,
    "sim/traffic.py:WORD_BITS": "the layout of arrays in HLO",
    "sim/work.py:PASSES": "XLA's bf16_6x and bf16_3x",
}
"""``path:name`` to the reason why its numbers are none of hardware."""


def test_hardware_numbers_stand_in_the_tables() -> None:
    found = numbers(ROOT / "src" / "systolic", FIELDS)
    assert [number for number in found if number.where not in ALLOWED] == []
    assert {number.where for number in found} == set(ALLOWED), "an exception is left over"


PLANTED = """
PCIE_BYTES_PER_SECOND = 16
SIZE = 64 * 2**20
HASH = 0x9E3779B97F4A7C15
LINKS = {"v5e": 45.5e9}
def rate(chip, watts=170.0):
    return chip.dcn_bytes_per_second_per_host or 25e9
def width(chip):
    return (chip.mxu_shape or (128, 128))[0]
def shown(seconds, bytes_):
    return bytes_ / seconds / 1e9
class Rates:
    hbm_share: float = 0.5
"""


def test_a_number_of_hardware_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "plan.py").write_text(PLANTED)
    (tmp_path / "sim" / "price.py").write_text("LATENCY: float = 3e-7\nNAMES = ('a',)\nNONE = 0\n")
    assert numbers(tmp_path, FIELDS) == [
        Number("plan.py:LINKS", 5, 45.5e9),
        Number("plan.py:PCIE_BYTES_PER_SECOND", 2, 16),
        Number("plan.py:Rates", 13, 0.5),
        Number("plan.py:rate", 6, 170.0),
        Number("plan.py:rate", 7, 25e9),
        Number("plan.py:width", 9, 128),
        Number("sim/price.py:LATENCY", 1, 3e-7),
    ]
