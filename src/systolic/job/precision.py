"""Numeric formats of compute. Master weights and optimizer state stay float32 in all of them."""

import enum


class Precision(enum.Enum):
    """The dtype of activations and of the weights' working copy."""

    auto = "auto"
    """bf16 where the chip has it natively, else f32."""
    bf16 = "bf16"
    f32 = "f32"
    f16 = "f16"
    """float16 with dynamic loss scaling."""
    int8 = "int8"
    """bf16 with int8 operands in the layers' weight matmuls, forward and backward, scaled per channel (decoders)."""
    fp8 = "fp8"
    """The same with float8: e4m3 forward, e5m2 gradients (decoders)."""

    def resolve(self, platform: str) -> "Precision":
        """``auto`` made definite for a platform: ``tpu`` and ``gpu`` have bf16 units, ``cpu`` is taken not to."""
        if self is not Precision.auto:
            return self
        return Precision.f32 if platform == "cpu" else Precision.bf16

    @property
    def dtype(self) -> str:
        """The numpy name of the compute dtype of a resolved precision."""
        return {"f32": "float32", "f16": "float16"}.get(self.value, "bfloat16")

    @property
    def operands(self) -> str | None:
        """``int8`` or ``fp8`` where weight matmuls have narrower operands than the dtype."""
        return self.value if self in (Precision.int8, Precision.fp8) else None
