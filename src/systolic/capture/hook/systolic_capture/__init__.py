"""Captures a JAX program: it sees the devices of a slice, its calls are recorded, and its step is compiled for the slice.

``bridge`` shows the devices, ``dispatch`` what the program does with arrays, ``calls`` records its calls, ``step_search`` finds the
step among them, and ``compiling`` writes the schedule and the answer to the folder that ``SYSTOLIC_CAPTURE`` names.
"""

import importlib
import importlib.machinery
import os
import sys

PATCHES = {
    "jaxlib.plugin_support": ("bridge", "patch_plugins"),
    "jax._src.xla_bridge": ("bridge", "patch_bridge"),
    "jax._src.distributed": ("hosts", "patch_distributed"),
    "jax.experimental.multihost_utils": ("hosts", "patch_utils"),
    "jax._src.mesh": ("bridge", "patch_mesh"),
    "jax._src.interpreters.pxla": ("bridge", "patch_default_device"),
    "jax._src.sharding_impls": ("bridge", "patch_shardings"),
    "jax._src.core": ("dispatch", "patch_core"),
    "jax._src.dispatch": ("dispatch", "patch_put"),
    "jax._src.array": ("dispatch", "patch_array"),
    "jax._src.pjit": ("dispatch", "patch_jit"),
    "jax._src.stages": ("dispatch", "patch_stages"),
    "jax": ("dispatch", "patch_jax"),
}
"""Modules of jax that are changed as soon as they are imported, before others take names from them."""


PLATFORMS = "JAX_PLATFORMS"
_asked_platforms = []


def show_platforms():
    """The variable as the program would find it on the slice: jax has read it, and others ask it whether there are TPUs."""
    platforms = _asked_platforms[-1]
    if platforms in (None, "cpu"):  # that of a machine without TPUs
        del os.environ[PLATFORMS]
    else:
        os.environ[PLATFORMS] = platforms


# Neither is a class of importlib.abc, whose import takes longer than that of all else here.
class _Loader:
    def __init__(self, loader, patch):
        self._loader, self._patch = loader, patch

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._patch(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        if name == "jax":
            from systolic_capture import report

            report.say(stage="importing")
            report.check_environment()
            _asked_platforms.append(os.environ.get(PLATFORMS))
            os.environ[PLATFORMS] = "cpu"  # whatever the program says: what is computed is there
        module, function = PATCHES[name]
        patch = getattr(importlib.import_module(f"systolic_capture.{module}"), function)
        spec.loader = _Loader(spec.loader, patch)  # ty: ignore[invalid-assignment]
        return spec


def install():
    """Waits for jax to be imported."""
    from systolic_capture import report

    report.say(python=sys.executable)
    sys.meta_path.insert(0, _Finder())
