"""The local devices."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systolic.chips import Chip, by_device_kind
from systolic.core.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDevices:
    """Devices that this process computes on."""

    devices: Sequence[Any]
    """All devices of the run, those of other hosts included."""
    platform: str
    """``tpu``, ``gpu`` or ``cpu``."""
    kind: str
    """Device kind in JAX: ``TPU v5 lite``, ``cpu``."""
    peak_bf16_flops_per_second: float | None
    """Published dense bf16 peak of all devices together; ``None`` where the catalogue has none."""

    @property
    def name(self) -> str:
        """Number and kind: ``4 x TPU v5 lite`` or ``1 x cpu``."""
        return f"{len(self.devices)} x {self.kind}"

    @property
    def chip(self) -> Chip | None:
        """Chip in the catalogue; ``None`` for a CPU or an unknown kind."""
        return None if self.platform == "cpu" else by_device_kind(self.devices[0].device_kind)

    @classmethod
    def here(cls) -> "LocalDevices":
        """Starts JAX's default backend and lists its devices.

        Raises:
            RunError: an accelerator is in this machine but JAX has fallen back to the CPU.
        """
        import jax

        devices = jax.devices()
        first = devices[0]
        _refuse_silent_fallback(first.platform)
        chip = by_device_kind(first.device_kind)
        peak = None
        if chip is not None and chip.peak_bf16_flops_per_second is not None:
            peak = chip.peak_bf16_flops_per_second / (chip.devices_per_chip or 1) * len(devices)
        return cls(
            devices=devices,
            platform=first.platform,
            kind=first.device_kind,
            peak_bf16_flops_per_second=peak,
        )

    def memory_bytes(self) -> int | None:
        """Bytes in use on the first local device, ``None`` where the backend doesn't say."""
        import jax

        stats = jax.local_devices()[0].memory_stats()
        return None if not stats else stats.get("bytes_in_use")


def _refuse_silent_fallback(platform: str) -> None:
    """Refuses a CPU run on a machine with an accelerator, unless JAX_PLATFORMS requests it."""
    if platform != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return
    accelerators = [
        path for path in ("/dev/accel0", "/dev/vfio/0", "/dev/nvidia0") if os.path.exists(path)
    ]
    if accelerators:
        raise RunError(
            f"{accelerators[0]} is an accelerator but JAX fell back to the CPU; run systolic doctor, or set JAX_PLATFORMS=cpu to train on the CPU"
        )
