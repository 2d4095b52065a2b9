"""Ops of a profile with their work: from the profile's stats, its compiled module, or the op's HLO line."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.module import named
from systolic.profile.kinds import Activity, kind_of
from systolic.profile.line import OpLine, read_line
from systolic.profile.trace import Backend, DeviceOp, DeviceTrace
from systolic.profile.traffic import OpTraffic, traffic_of
from systolic.sim.layers import layer_of
from systolic.sim.timeline import Resource
from systolic.sim.work import Work, work_of

LINKS = (Resource.ici, Resource.dcn, Resource.host)
_OF_KIND = {
    Activity.collective: Resource.ici,
    Activity.slices: Resource.dcn,
    Activity.host: Resource.host,
    Activity.callback: Resource.host,
    Activity.formatting: Resource.hbm,
    Activity.memory: Resource.hbm,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledOp:
    """One run of an op in the step, with its place in the module where the profile has that."""

    raw: DeviceOp
    seconds: float
    """Its share of the step."""
    flight: float = 0.0
    """From its start to its end; of an asynchronous op that was waited for, from when it had its link for itself."""
    opcode: str
    op_name: str
    source: str
    flops: float
    bytes: float
    dtype: str
    """HLO dtype of a matmul's operands; empty where it is not known."""
    kind: Activity
    traffic: OpTraffic
    resource: Resource
    line: OpLine | None = None
    module: Module | None = None
    computation: Computation | None = None
    instruction: Instruction | None = None

    @property
    def layer(self) -> str:
        """Path of names in the model."""
        return layer_of(self.op_name)

    @property
    def target(self) -> str:
        """Target of a custom call."""
        return _target(self.line, self.instruction)


@dataclass(frozen=True)
class Describer:
    """Describes the ops of a device; what all runs of an op share is found once."""

    trace: DeviceTrace

    @cached_property
    def _known(self) -> dict[tuple[int | None, str, str], ProfiledOp]:
        return {}

    @cached_property
    def _index(self) -> Mapping[int, Mapping[str, tuple[Computation, Instruction]]]:
        return {
            program: {i.name: (c, i) for c in module.computations.values() for i in c}
            for program, module in self.trace.modules.items()
        }

    def __call__(self, op: DeviceOp) -> ProfiledOp:
        """The op with its work; ``raw`` is any of its runs."""
        key = op.program, op.name, op.text
        if key not in self._known:
            self._known[key] = self._described(op)
        return self._known[key]

    def _described(self, op: DeviceOp) -> ProfiledOp:
        module = self.trace.modules.get(op.program) if op.program is not None else None
        places = self._index.get(op.program, {}) if op.program is not None else {}
        computation, instruction = places.get(op.name, (None, None))
        line = read_line(op.text) if op.text else None
        if module is None or computation is None or instruction is None:
            return self._made(op, line, Work(dtype=""), op.op_name, op.source)
        source = named(module, computation, instruction)
        where = module.source(source)
        return self._made(
            op,
            line,
            work_of(module, computation, instruction),
            op.op_name or source.op_name,
            op.source or (str(where) if where else ""),
            (module, computation, instruction),
        )

    def _made(
        self,
        op: DeviceOp,
        line: OpLine | None,
        work: Work,
        op_name: str,
        source: str,
        place: tuple[Module, Computation, Instruction] | None = None,
    ) -> ProfiledOp:
        instruction = place[2] if place else None
        opcode = op.opcode or (instruction.opcode if instruction is not None else "")
        traffic = traffic_of(line, op.bytes or (0.0 if line else work.bytes), op.hbm)
        target = _target(line, instruction)
        kind = kind_of(op.name, opcode, op.category, line, target, traffic)
        flops, moved = op.flops or work.flops, op.bytes or work.bytes
        dtype = work.dtype if work.flops else ""
        if kind is Activity.other and dtype:
            kind = Activity.matmul
        return ProfiledOp(
            raw=op,
            seconds=0.0,
            opcode=opcode,
            op_name=op_name,
            source=source,
            flops=flops,
            bytes=moved,
            dtype=dtype,
            kind=kind,
            traffic=traffic,
            resource=self._resource(kind, flops, moved, dtype if place else "bf16"),
            line=line,
            module=place[0] if place else None,
            computation=place[1] if place else None,
            instruction=instruction,
        )

    def _resource(self, kind: Activity, flops: float, moved: float, dtype: str) -> Resource:
        """Resource that bounds an op: by its kind, then by its work over the device's peaks."""
        if kind in _OF_KIND:
            return _OF_KIND[kind]
        if not flops and not moved:
            return Resource.vpu
        if self.trace.backend is Backend.tpu and kind not in (Activity.matmul, Activity.kernel):
            flops = 0.0  # the profile counts a vector unit's additions too
        peak = self.trace.peak(dtype)
        if peak and self.trace.peak_bytes and flops:
            full = flops / peak >= moved / self.trace.peak_bytes
            return Resource.mxu if full else Resource.hbm
        return Resource.mxu if flops else Resource.hbm


def _target(line: OpLine | None, instruction: Instruction | None) -> str:
    if instruction is not None and instruction.target:
        return instruction.target
    return line.target if line is not None else ""
