"""The installed libtpu takes the flags that all jobs share, on every generation, as options of a program."""

from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiled, Compiler, compile
from systolic.compiling.compile import version
from tests.compiling import functions

SLICES = ("v2-8", "v3-8", "v4-8", "v5e-4", "v5p-8", "v6e-4", "tpu7x-8")

pytestmark = pytest.mark.skipif(version("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_every_generation_compiles_with_its_flags(tmp_path: Path, name: str) -> None:
    on = slice(name)
    flags = resolved("", on.chip)
    compiler = Compiler(root=tmp_path, flags=flags).quick()
    made = compile(functions.program(functions.matmul, on.name), on, compiler)
    assert isinstance(made, Compiled)
    assert made.report.flags == list(flags)


@pytest.mark.slow
def test_a_flag_that_is_no_option_goes_into_the_environment(tmp_path: Path) -> None:
    on = slice("v6e-4")
    flag = "--xla_sc_disjoint_spmem=false"  # libtpu 0.0.42.1 knows it on its command line only
    compiler = Compiler(root=tmp_path, flags=(flag,)).quick()
    made = compile(functions.program(functions.matmul, on.name), on, compiler)
    assert isinstance(made, Compiled)
    assert made.report.flags == [flag]
