"""Results of ``jitted.lower(...).compile()`` for the program; imported once jax is there."""

import collections
import functools
import math

import jax
from jax._src import core

from systolic_capture import (
    arrays,
    bodies,
    bridge,
    calls,
    dispatch,
    flops,
    memory,
    report,
    shardings,
)


class Lowered(calls.Call):
    """A program that the program under capture lowered and compiled itself."""

    args, kept, flops, eqns = (), (), 0.0, 0
    flops_are_least, open_loops, traces, closed_over = True, (), 0, ()  # of a body that is gone

    def __init__(self, lowered, options):
        self._lowering = lowered._lowering
        self.key = ("lowered", id(self._lowering))
        self.options = dict(options or {})
        self.name = str(getattr(self._lowering, "_name", "program"))
        if self.name == f"jit({report.request().step})":
            self.name = report.request().step  # either is one of its names
        self._params = dispatch.body_of(self._lowering) or {}
        self.jaxpr = self._params.get("jaxpr")
        if self.jaxpr is not None:
            self.name = bodies.name_of(self.jaxpr, self.name)
            self.flops, self.eqns = flops.of_jaxpr(self.body), len(self.body.eqns)
            self.flops_are_least = flops.in_open_loops(self.body)
            self.open_loops = flops.open_loops(self.body)

    def take(self, args):
        """Notes the arguments of a call of it."""
        indices = self._lowering.compile_args.get("kept_var_idx")
        kept = args if indices is None else [args[n] for n in sorted(indices) if n < len(args)]
        declared = self._params.get("in_shardings") or ()
        loose = ()
        if self.jaxpr is not None and len(declared) == len(args):
            loose = shardings.of_loose(args, self._params, shardings.context_mesh())
        calls.take(self, args, kept, loose)

    def lower(self):
        """The lowering that the program made."""
        return self._lowering


class CapturedCompiled:
    """Stands for ``jax.stages.Compiled``: its calls are recorded, and it is compiled once its analyses are asked for."""

    def __init__(self, lowered, options, compile):
        self._lowered, self._compile = lowered, compile
        self._call = Lowered(lowered, options)
        report.say(stage=f"running with {self._call.name} lowered")
        calls.know(self._call)

    def __getattr__(self, name):
        return getattr(self._lowered, name)

    def __call__(self, *args, **kwargs):
        """The results in shape alone."""
        flat = jax.tree.leaves((args, kwargs))
        arrays.check(flat)
        infos, tree = jax.tree.flatten(self._lowered.out_info)
        if self._call.places is None:
            self._call.places = self._places(flat, infos)
        self._call.take(flat)
        with memory.inside_call():
            sources = calls.record(self._call)
            arrays.donate(zip(flat, self._donated(flat), strict=True), infos, self._call.places)
            outs = [
                dispatch.stand_in(core.ShapedArray(info.shape, info.dtype), where, sources=sources)
                for info, where in zip(infos, self._call.places, strict=True)
            ]
        return jax.tree.unflatten(tree, outs)

    def _donated(self, values):
        """Whether each of the arguments is donated, as the program was lowered: jit drops those that it does not use."""
        donated = [
            bool(getattr(info, "donated", False))
            for info in jax.tree.leaves(getattr(self._lowered, "args_info", ()))
        ]
        if len(donated) != len(values):
            calls.note(
                f"{self._call.name} was called with {len(values)} arrays and lowered for {len(donated)}: none is taken as donated"
            )
            return [False] * len(values)
        kept = self._lowered._lowering.compile_args.get("kept_var_idx")
        return [gone and (kept is None or n in kept) for n, gone in enumerate(donated)]

    def _places(self, args, infos):
        """Shardings of the results: as lowered, as constrained in the body, or like an argument."""
        lowering = self._lowered._lowering
        declared = lowering.compile_args.get("out_shardings") or [None] * len(infos)
        mesh = shardings.mesh_of(args) or shardings.context_mesh()
        params = dispatch.body_of(lowering)
        if params and len(shardings.Inner(params["jaxpr"]).jaxpr.invars) == len(args):
            places = shardings.of_results(
                args,
                {**params, "out_shardings": declared},
                mesh,
                dispatch.first_device,
                shardings.Partitions(
                    self._call.name, params["jaxpr"], lambda: lowering, self._chosen
                ),
            )
            return [where for where, _ in places]
        args = list(filter(arrays.is_slice_array, args))
        alike = shardings.alike(args, [arg.sharding for arg in args])
        other = dispatch.first_device() if mesh is None else shardings.replicated(mesh)
        return [
            where if bridge.on_slice(where) else shardings.next_alike(alike, info) or other
            for where, info in zip(declared, infos, strict=True)
        ]

    def _chosen(self):
        """Shardings of the results that the compiler chooses."""
        if self._compiled is None:
            raise RuntimeError("the compiler refuses it")
        return list(self._compiled._executable._out_shardings)

    @functools.cached_property
    def _compiled(self):
        """The compiler's own; None where it refuses the program, which the forecast says."""
        report.say(stage=f"compiling {self._call.name}, whose analysis the program asks for")
        try:
            return self._compile()
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            calls.note(
                f"the program asked for the compiler's analysis of {self._call.name} and was given none: compiling it failed ({reason})"
            )
            return None

    def cost_analysis(self):
        """The compiler's, in the form of this jax."""
        return self._compiled.cost_analysis() if self._compiled else {}

    def memory_analysis(self):
        """The compiler's, in the form of this jax; of a quick capture the arguments and results as lowered."""
        if report.request().quick and "_compiled" not in vars(self):
            return self._as_lowered
        return self._compiled.memory_analysis() if self._compiled else None

    @functools.cached_property
    def _as_lowered(self):
        """Memory that is known before the compile, which would take libtpu until all code of the program is generated."""
        calls.note(
            f"the program asked for the memory of {self._call.name} and was given that of its arguments and results, with no temporaries; without --quick it is compiled for it"
        )
        kept = self._lowered._lowering.compile_args.get("kept_var_idx")
        infos = jax.tree.leaves(self._lowered.args_info)
        infos = [info for n, info in enumerate(infos) if kept is None or n in kept]
        places = jax.tree.leaves(self.input_shardings)
        results = jax.tree.leaves(self._lowered.out_info)
        return MemoryStats(
            [(info, where, info.donated) for info, where in zip(infos, places, strict=True)],
            zip(results, jax.tree.leaves(self.output_shardings), strict=True),
        )

    def as_text(self):
        """The program as it was lowered, or compiled where it is."""
        compiled = vars(self).get("_compiled")
        return (compiled or self._lowered).as_text()

    @property
    def input_shardings(self):
        """Shardings of the arguments as lowered."""
        lowering = self._lowered._lowering
        leaves = tuple(lowering.compile_args.get("in_shardings", ()))
        tree = getattr(self._lowered, "in_tree", None)
        if tree is not None and tree.num_leaves == len(leaves):
            return jax.tree.unflatten(tree, leaves)
        return (leaves, {})

    @property
    def output_shardings(self):
        """Shardings of the results as lowered."""
        infos, tree = jax.tree.flatten(self._lowered.out_info)
        if self._call.places is None:
            self._call.places = self._places(self._as_declared(), infos)
        return jax.tree.unflatten(tree, self._call.places)

    def _as_declared(self):
        """Stand-ins for the arguments, each where it was lowered for."""
        compile_args = self._lowered._lowering.compile_args
        infos = jax.tree.leaves(self._lowered.args_info)
        kept = compile_args.get("kept_var_idx")
        kept = range(len(infos)) if kept is None else sorted(kept)
        places = dict(zip(kept, compile_args.get("in_shardings", ()), strict=False))
        stand_ins = []
        for number, info in enumerate(infos):
            where = places.get(number)
            # A number of the host is lowered as one that has no mesh.
            is_placed = bridge.on_slice(where) and type(where).__name__ != "GSPMDSharding"
            stand_ins.append(
                dispatch.stand_in(
                    core.ShapedArray(info.shape, info.dtype),
                    where if is_placed else dispatch.first_device(),
                    is_placed,
                    buffer=False,
                )
            )
        return stand_ins


class MemoryStats:
    """Bytes on a device of a program that is lowered, as ``CompiledMemoryStats`` names them: its code and temporaries are not known."""

    generated_code_size_in_bytes = host_generated_code_size_in_bytes = 0
    temp_size_in_bytes = host_temp_size_in_bytes = 0
    serialized_buffer_assignment_proto = b""

    def __init__(self, arguments, results):
        """
        Args:
            arguments: Each with its sharding, and whether it is donated.
            results: Each with its sharding.
        """
        sizes, donated = collections.Counter(), collections.Counter()
        for value, where, gone in arguments:
            place, size = _part(value, where)
            sizes[place, "argument"] += size
            donated[place, size, value.dtype] += gone
        for value, where in results:
            place, size = _part(value, where)
            sizes[place, "output"] += size
            if donated[place, size, value.dtype] > 0:
                donated[place, size, value.dtype] -= 1
                sizes[place, "alias"] += size
        for place in ("", "host_"):
            for kind in ("argument", "output", "alias"):
                setattr(self, f"{place}{kind}_size_in_bytes", sizes[place, kind])
        kept = sizes["", "argument"] + sizes["", "output"]
        self.peak_memory_in_bytes = kept - sizes["", "alias"]


def _part(value, where):
    """The memory that an array lies in, and the bytes of a device's part of it."""
    shape = where.shard_shape(value.shape) if hasattr(where, "shard_shape") else value.shape
    host = str(getattr(where, "memory_kind", None)).endswith("host")
    return "host_" if host else "", math.prod(shape) * value.dtype.itemsize
