"""A function for converters, which know convolutions and matmuls and few loops."""

from systolic.exporting.inference import PORTABLE, ExportableModel
from systolic.models.vision.mobilenet.config import MobileNetV2


def plain_platform(model: ExportableModel) -> str:
    """The platform whose program a converter takes best.

    That of a CPU has the layers one after another in place of a loop. MobileNetV2 has no loop, and on a CPU it has
    sums of shifted pictures in place of convolutions.
    """
    return PORTABLE if isinstance(model.job.model, MobileNetV2) else "cpu"
