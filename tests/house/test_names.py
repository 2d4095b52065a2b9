"""No dead public name, one class of each name, no attribute asked for by luck, no private name of others; and the checks would see one."""

from pathlib import Path

from tests.house.budget import ROOT
from tests.house.names import by_luck, dead, doubles, intrusions, missing

PUBLIC: dict[str, str] = {
    "systolic/serving/http/process.py:Process.handle_exit": "uvicorn calls it",
    "systolic/runs/recipe_folder.py:Unwritten.set_data": "importlib calls it",
}
"""Names for users of the package that nothing here uses, with the reason."""

FOREIGN: dict[str, str] = {
    "systolic/compiling/child.py:places:slice_index": "devices of JAX's plugins, of which some have none",
    "systolic/compiling/functions.py:_placed:shape": "leaves of anyone's arguments",
    "systolic/compiling/traced.py:name_of:__name__": "anyone's callable",
    "systolic/formats/conversion.py:_turns:consts": "a loop's body, closed over its constants in some versions of JAX",
    "systolic/formats/conversion.py:_turns:jaxpr": "the same",
    "systolic/steps/tasks/__init__.py:cross_entropy_of:target": "modules of users, of which some keep no target",
}
"""``path:function:attribute`` of values of other projects."""

PRIVATE: dict[str, str] = {
    "systolic/compiling/child.py:jax._src.source_info_util": "that lines of this package are not the user's",
    "systolic/compiling/functions.py:_jit_info": "whether a jitted function was given shardings",
    "systolic/compiling/gpu_compiler.py:jax._src.cudnn.fused_attention_stablehlo": "cuDNN's version, which JAX asks of a GPU that is not here",
    "systolic/compiling/kernels.py:jax._src.lib.mlir.ir": "parser of MLIR, for the operations of a kernel",
    "systolic/compiling/kernels.py:jax._src.lib.tpu": "dialect of Mosaic, for the operations of a kernel",
    "systolic/compiling/pickled.py:_GeneratorContextManager": "what contextlib.contextmanager makes has no public class",
    "systolic/compiling/pickled.py:_lru_cache_wrapper": "what functools.lru_cache makes has no public class",
    "systolic/compiling/restored.py:_GeneratorContextManager": "what contextlib.contextmanager makes has no public class",
    "systolic/compiling/restored.py:_registry": "how a class is a pytree; JAX only tells that of an object",
    "systolic/compiling/restored.py:jax._src.pmap": "what jax.pmap returns has no class of its own",
    "systolic/compiling/restored.py:jax._src.tree_util": "how a class is a pytree; JAX only tells that of an object",
    "systolic/core/shutdown.py:_run_exitfuncs": "functions of atexit, before the process is ended at once",
    "systolic/forecasting/function.py:jax._src.mesh": "whether a mesh was entered with ``with mesh``",
    "systolic/formats/litert/child.py:litert_converter.mlir._mlir_libs.converter_api_ext": "the converter's only entrance",
    "systolic/models/attention.py:jax._src.cudnn.fused_attention_stablehlo": "that cuDNN writes no gradient of a mask",
    "systolic/models/linear.py:qwix._src.core.dot_general_qt.DotGeneralQtConfig": "Qwix's quantized product without its rules",
    "systolic/models/linear.py:qwix._src.core.dot_general_qt.dot_general_qt": "Qwix's quantized product without its rules",
    "systolic/models/program/torch_function.py:_elem": "the array of torchax's tensor",
    "systolic/models/program/torch_function.py:_env": "the environment of torchax's tensor",
    "systolic/models/program/torch_function.py:_ops": "overloads that torchax names and PyTorch has removed",
    "systolic/models/program/torch_function.py:torch.nn.utils.stateless._reparametrize_module": "parameters of a module for one call of any of its methods",
    "systolic/models/program/torch_function.py:torch.utils._pytree": "pytrees as torch.export has them",
    "systolic/models/program/torch_function.py:torch.utils._pytree.tree_leaves": "pytrees as torch.export has them",
    "systolic/models/program/torch_function.py:torch.utils._pytree.tree_map_only": "pytrees as torch.export has them",
    "systolic/models/program/torch_training.py:torch.nn.utils.stateless._reparametrize_module": "parameters of a module for one call of any of its methods",
    "systolic/models/quantized/codes.py:qwix._src.core.qarray": "Qwix's quantized arrays without its rules",
    "systolic/models/splash.py:_ComputableMask": "the base of masks that are computed in the kernel",
    "systolic/profile/xplane.py:jaxlib._hlo": "reader of the compiled modules in a profile",
    "systolic/training/distributed/heartbeat.py:jax._src.distributed": "key-value store of the coordinator",
}
"""``path:name`` of other projects, with what no public name of theirs gives."""


def test_no_private_name_of_others(tmp_path: Path) -> None:
    found = set(intrusions(ROOT))
    assert sorted(found - set(PRIVATE)) == []
    assert sorted(set(PRIVATE) - found) == [], "an exception is left over"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text(
        "import jax._src.core, os\nfrom __future__ import annotations\nfrom optuna.storages import _rdb, RDBStorage\n"
        "import_module('flax._src.nnx')\nprint(study._storage.engine, self._own, other._own, os._exit, a.__doc__)\n"
    )
    assert intrusions(tmp_path) == [
        "one.py:_storage",
        "one.py:flax._src.nnx",
        "one.py:jax._src.core",
        "one.py:optuna.storages._rdb",
    ]


def test_no_public_name_is_dead() -> None:
    found = set(dead(ROOT))
    assert sorted(found - set(PUBLIC)) == []
    assert sorted(set(PUBLIC) - found) == [], "an exception is left over"


def test_one_class_of_each_name() -> None:
    assert doubles(ROOT) == {}


def test_scripts_import_what_is_there(tmp_path: Path) -> None:
    assert missing(ROOT) == []
    (tmp_path / "src" / "systolic").mkdir(parents=True)
    (tmp_path / "src" / "systolic" / "here.py").write_text("def known(): ...")
    (tmp_path / "benchmarks").mkdir()
    script = "from systolic.here import known, gone\nfrom systolic.away import known"
    (tmp_path / "benchmarks" / "run.py").write_text(script)
    assert [line.split(" imports ")[1] for line in missing(tmp_path)] == [
        "systolic.here.gone",
        "systolic.away.known",
    ]


def test_attributes_are_known() -> None:
    assert by_luck(ROOT) == sorted(FOREIGN)


ONE = '''
"""Text that has the word unused, and `LIMIT`."""
LIMIT = 3
SHARE = 1.0
LEAST: int = 2
_PRIVATE = 1
def used(x): return LEAST
def read_here(): return 1
def unused(x): return unused(getattr(x, "size", 0))
class Part:
    def read(self): return hasattr(self, "size")
    def kept(self): return self.read()
    def never(self): pass
    def shown(self): pass
class Alone:
    pass
'''


def test_a_planted_name_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "src" / "systolic"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from systolic.one import Alone, read_here, unused\n__all__ = ['Alone']\nprint(read_here())\n"
    )
    (package / "one.py").write_text(ONE)
    (package / "two.py").write_text("from systolic.one import Part, used\nclass Alone: ...\n")
    (tmp_path / "README.md").write_text("Nothing is unused: `LIMIT` is 3.\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "run.py").write_text("print(part.kept())\n")
    (package / "page.html").write_text("<p>SHARE {{ part.shown() }}</p>")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("from systolic.one import Alone, unused\n")
    assert dead(tmp_path) == [
        "systolic/one.py:Alone",
        "systolic/one.py:Part.never",
        "systolic/one.py:SHARE",
        "systolic/one.py:unused",
        "systolic/two.py:Alone",
    ]
    assert doubles(tmp_path) == {"Alone": ["systolic/one.py", "systolic/two.py"]}
    assert by_luck(tmp_path) == ["systolic/one.py:read:size", "systolic/one.py:unused:size"]
