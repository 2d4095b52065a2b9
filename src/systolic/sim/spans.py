"""The span of an op, with its place in the model and in the source."""

from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.origin import named
from systolic.sim.layers import layer_of
from systolic.sim.timeline import Resource, Span


def span_of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    seconds: float,
    resource: Resource,
) -> Span:
    """Span of an op from the start of its computation, on the core."""
    origin = named(module, computation, instruction)
    source = module.source(origin)
    return Span(
        name=instruction.name,
        opcode=instruction.opcode,
        start=0.0,
        seconds=seconds,
        resource=resource,
        layer=layer_of(origin.op_name),
        source=str(source) if source else "",
    )
