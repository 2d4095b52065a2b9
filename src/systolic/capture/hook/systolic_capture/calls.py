"""The calls of jitted functions on the slice, and which of them are a step."""

import atexit
import functools
import os
import sys
import threading
import time
from typing import Any

from systolic_capture import arrays, bridge, dispatch, flops, report, shardings

SURE_CALLS = 40
"""Calls after which a repeated sequence is taken for the step, whatever the time."""
SURE_SECONDS = 4.0
"""Seconds after which it is taken."""
UNCHANGED_CALLS, UNCHANGED_SECONDS = 600, 20.0
"""The same where calls have large arguments that stay the same: a step may gather gradients of several batches before it
changes the weights."""

SAME = 0.05
"""Share of the bytes of a call's arguments that the call before had too: above it they are taken for weights that stayed."""
BESIDE = 0.1
"""Share of a repeated sequence's FLOPs: below it, what is beside steps within the sequence is no part of them."""
LONGEST = 300
"""Most calls of a step."""

_lock = threading.RLock()
_known = {}
_sequence = []
_operations = {}
_state: dict[str, Any] = {"ended": False, "error": "", "ours": False}
notes = []
"""What the answer says beside."""


class Call:
    """One call of a jitted function: what is needed to lower it, and the shapes of its results."""

    def __init__(self, args, params, own):
        body = shardings.inner(params["jaxpr"])
        self.name = str(params.get("name") or "jit")
        self.source = body.source
        self.own = own
        self.params = dict(params)
        self.mesh = dispatch.context_mesh()
        self.args = [self._kept(one) for one in args]
        self._hoist(body)
        self.ids, self.links = arrays.serials(args), arrays.links(args)
        self.key = (
            self.name,
            self.source,
            tuple((str(one.aval), one.sharding if one._committed else None) for one in self.args),
            tuple(params.get("donated_invars", ())),
            len(body.jaxpr.eqns),
        )
        self.eqns = len(body.jaxpr.eqns)

    def _kept(self, value):
        """An argument without its data."""
        if arrays.is_slice_array(value):
            return value
        return arrays.array_class()(dispatch.aval_of(value), dispatch.first_device(), False)

    def _constant(self, value):
        """An array that the function refers to: on one device it goes wherever the call does."""
        if arrays.is_slice_array(value) and len(value.sharding.device_set) > 1:
            return value
        return arrays.array_class()(dispatch.aval_of(value), dispatch.first_device(), False)

    def _hoist(self, body):
        """Makes arguments of arrays on the slice that the function refers to."""
        if not any(map(arrays.is_slice_array, body.consts)):
            return
        from jax._src.interpreters import partial_eval

        count = len(body.consts)
        self.params["jaxpr"] = partial_eval.close_jaxpr(
            partial_eval.convert_constvars_jaxpr(body.jaxpr)
        )
        self.args = [self._constant(one) for one in body.consts] + self.args
        unspecified = _unspecified()
        for name, filler in (
            ("in_shardings", unspecified),
            ("in_layouts", None),
            ("donated_invars", False),
        ):
            if name in self.params:
                self.params[name] = (filler,) * count + tuple(self.params[name])

    @functools.cached_property
    def flops(self):
        """FLOPs of the matmuls and convolutions of the body, over all devices."""
        return flops.of_jaxpr(shardings.inner(self.params["jaxpr"]).jaxpr)

    @property
    def flops_are_least(self):
        """Whether some of them are in loops of unknown length, counted once."""
        return flops.in_open_loops(shardings.inner(self.params["jaxpr"]).jaxpr)

    def results(self):
        """The results in shape alone."""
        avals = shardings.inner(self.params["jaxpr"]).outvars_avals()
        known = _known.get(self.key)
        if known is not None:
            places = known.places
        else:
            places = shardings.of_results(
                self.args, self.params, self.mesh, dispatch.first_device, self._chosen
            )
        self.places = places
        return [
            dispatch.stand_in(shardings.placed(aval, where[0]), *where)
            for aval, where in zip(avals, places, strict=True)
        ]

    def _chosen(self):
        """Shardings of the results that the compiler chooses; None where it fails."""
        report.say(stage=f"compiling {self.name} for the shardings of its results")
        try:
            made = self.lower().compile(compiler_options=_least_effort())
            return list(made._out_shardings)
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            note(
                f"the shardings of the results of {self.name} are taken as whole on every device: compiling it failed ({reason})"
            )
            return None

    def lower(self):
        """The call lowered for TPUs."""
        from jax._src import pjit
        from jax._src.interpreters import mlir

        convert = getattr(pjit, "convert_to_metaty", lambda one: one)
        args = [convert(one) for one in self.args]
        return pjit._resolve_and_lower(
            args,
            **self.params,
            lowering_platforms=("tpu",),
            lowering_parameters=mlir.LoweringParameters(),
            pgle_profiler=None,
        )


def _least_effort():
    """Options of the quickest compile; jax 0.11 took the finer one away."""
    from jax._src import config

    if hasattr(config, "exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": -1.0}
    return {"optimization_level": 1}


def _unspecified():
    from jax._src import sharding_impls

    return sharding_impls.UNSPECIFIED


class Lowered:
    """A program that the program under capture lowered and compiled itself."""

    own = False
    flops_are_least = True  # its body is gone

    def __init__(self, lowered, options):
        lowering = lowered._lowering
        self.name = str(getattr(lowering, "_name", "program"))
        self.source, self.options = "", dict(options or {})
        self._lowering, self.args, self.ids = lowering, [], []
        self.links = arrays.links([])
        self.key = ("lowered", id(lowering))
        self.flops, self.eqns = 0.0, 0
        self.places = None

    def lower(self):
        """As it is."""
        return self._lowering


def note(text):
    """Adds a note to the answer, once."""
    if text not in notes:
        notes.append(text)


def count_operation(name):
    """Counts an operation outside of jit on arrays of the slice."""
    with _lock:
        _operations[name] = _operations.get(name, 0) + 1


def is_for_slice(lowering):
    """Whether a lowered program is for the slice."""
    devices = device_assignment(lowering)
    return bool(devices) and bridge.is_slice_device(devices[0])


def device_assignment(lowering):
    """Devices of a lowered program in its order."""
    found = getattr(lowering, "_device_list", None)
    if found is None:
        found = lowering.compile_args.get("device_assignment")
    return tuple(found or ())


def know(call):
    """Keeps a program that may never be called."""
    with _lock:
        _known.setdefault(call.key, call)


def start():
    """Begins to wait for calls; the program's own end is an end of the capture too."""
    from systolic_capture import compiling

    compiling.start()
    report.end_with_parent()
    atexit.register(_at_exit)
    real = sys.excepthook

    def hook(kind, error, trace):
        _state["error"] = " ".join(f"{kind.__name__}: {error}".split())[:600]
        _state["ours"] = _is_ours(trace)
        real(kind, error, trace)

    sys.excepthook = hook
    limit = report.request().get("limit_seconds", 1200)
    timer = threading.Timer(limit, _at_limit, (limit,))
    timer.daemon = True
    timer.start()


def _is_ours(trace):
    """Whether an error comes from a line of the capture, rather than of the program or of jax."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__)


def _is_alike(before, now, constant):
    """Whether a call has, by bytes, large arrays that the call before had and that are not constant."""
    known = {serial for serial, _ in before} - constant
    same = sum(size for serial, size in now if serial in known)
    return same > SAME * sum(size for _, size in now)


def _is_unchanged(length, end, constant=frozenset()):
    """Whether a call of the repeated sequence that ends there has large arguments of the one before it."""
    now, before = _sequence[end - length : end], _sequence[end - 2 * length : end - length]
    return any(_is_alike(b[2], a[2], constant) for a, b in zip(now, before, strict=True))


def record(call):
    """Adds a call to the sequence, and ends the program when its step is known; returns its number, None of jax's own."""
    if call.own:
        count_operation(call.name)
        return None
    with _lock:
        number = len(_sequence)
        if _state["ended"]:
            return number
        known = _known.setdefault(call.key, call)
        now = time.monotonic()
        if not _sequence:
            report.say(stage="running until a step repeats")
        _sequence.append((known, now, call.ids, sum(_operations.values()), call.links))
        if (found := _settled(now)) is not None:
            _state["ended"] = True
    if found is not None:
        from systolic_capture import compiling

        compiling.answer(found, "stopped when its step had repeated")
    return number


def _settled(now):
    """The calls of a step once they have repeated for long enough; None before."""
    period = _period()
    if period is None:
        return None
    chosen = report.request().get("step")
    step = [entry[0] for entry in _sequence[-period:]]
    if not any(one.name == chosen for one in step) if chosen else not _is_linked(period):
        return None
    repeats = _sequence[-min(len(_sequence), _repeats(period) * period) :]
    waited = now - repeats[0][1]
    unchanged = _is_unchanged(period, len(_sequence))
    most_calls = UNCHANGED_CALLS if unchanged else SURE_CALLS
    most_seconds = UNCHANGED_SECONDS if unchanged else SURE_SECONDS
    if len(repeats) < 3 or (len(repeats) < most_calls and waited < most_seconds):
        return None
    if unchanged and not chosen:
        note(
            "the large arguments of the step stayed the same from one to the next: of a program that gathers gradients of many batches, "
            "this is one of them; --step takes another function"
        )
    return step if chosen else _within(step)


def _within(step):
    """The steps inside of a repeated sequence that has little beside them, as of a log after each ten; else the sequence."""
    total, end = sum(one.flops for one in step), len(_sequence)
    # What the sequence before had too does not change with a step: a batch that is used again.
    before = _sequence[end - 2 * len(step) : end - len(step)]
    constant = {serial for entry in before for serial, _ in entry[2]}
    for length in range(1, len(step) // 3 + 1):
        for last in range(end, end - len(step) + 3 * length - 1, -1):
            inner = [entry[0] for entry in _sequence[last - length : last]]
            times = _repeats(length, last)
            beside = total - min(times, len(step) // length) * sum(one.flops for one in inner)
            if (
                times < 3
                or not total
                or beside > BESIDE * total
                or _is_unchanged(length, last, constant)
            ):
                continue
            skipped = len(step) - min(times, len(step) // length) * length
            note(f"{skipped} calls beside each {times} steps are not counted")
            return inner
    return step


def _period():
    """Length of the shortest sequence of calls that the last ones repeat; None without one."""
    keys = [entry[0].key for entry in _sequence[-2 * LONGEST :]]
    for length in range(1, len(keys) // 2 + 1):
        if (length == 1 and len(keys) < 3) or keys[-1] is not keys[-1 - length]:
            continue
        if keys[-length:] == keys[-2 * length : -length]:
            return length
    return None


def _is_linked(length):
    """Whether the last of the repeated sequences takes what the one before made or took: not so where the same function
    initializes one array after the other."""
    now, before = _sequence[-length:], _sequence[-2 * length : -length]
    start = len(_sequence) - 2 * length
    if any(start <= born < start + length for entry in now for born in entry[4][1]):
        return True
    taken = frozenset().union(*(entry[4][0] for entry in before))
    return any(taken & entry[4][0] for entry in now)


def _repeats(length, end=None):
    """How often the last calls before ``end`` repeat."""
    keys = [entry[0].key for entry in _sequence[:end]]
    times = 1
    while keys[-(times + 1) * length : -times * length or None] == keys[-length:]:
        times += 1
    return times


def operations_in(step):
    """Operations outside of jit between two steps."""
    length = len(step)
    if len(_sequence) <= length:
        return 0
    return _sequence[-1][3] - _sequence[-1 - length][3]


def counts():
    """Calls by program, in the order of their first."""
    found = {}
    for entry in _sequence:
        found[entry[0].key] = found.get(entry[0].key, 0) + 1
    return {key: (_known[key], found.get(key, 0)) for key in _known}


def _best():
    """The step of a program that ended, or was stopped, before one was sure."""
    chosen = report.request().get("step")
    tallied = list(counts().values())
    if chosen:
        tallied = [one for one in tallied if one[0].name == chosen]
        return [tallied[0][0]] if tallied else []
    if (period := _period()) is not None and _is_linked(period):
        return _within([entry[0] for entry in _sequence[-period:]])
    repeated = [one for one in tallied if one[1] > 1]
    if repeated:
        return [max(repeated, key=lambda one: (one[1] * one[0].flops, one[1]))[0]]
    if not tallied:
        return []
    note("no jitted call was made twice: the one with the most FLOPs is taken for the step")
    return [max(tallied, key=lambda one: (one[0].flops, one[0].eqns))[0]]


def _finish(ended):
    with _lock:
        if _state["ended"]:
            return
        _state["ended"] = True
        error = _state["error"]
        period = _period()  # of a program that failed, what is not linked is its initialization
        linked = period is not None and _is_linked(period)
        known = linked or report.request().get("step")
        step = _best() if known or not error else []
        names = sorted({one.name for one, _ in counts().values()})
        if error and not step:
            report.say(program_failed=error, ours=_state["ours"], called=names)
            return
        if error:
            note(
                f"the program failed after {len(_sequence)} calls ({error}); the step is of what it called before"
            )
    from systolic_capture import compiling

    chosen = report.request().get("step")
    if not step and chosen and names:
        report.refuse(f"the program calls no jitted function {chosen}; it calls {', '.join(names)}")
    if not step:
        report.say(without_calls=ended)
        return
    compiling.answer(step, ended)


def _at_exit():
    _finish("ended by itself")


def _at_limit(seconds):
    with _lock:
        if _state["ended"]:
            return  # it is compiling
    minutes = f"{seconds / 60:.3g} minutes"
    note(f"no step had repeated for sure after {minutes}")
    _finish(f"was stopped after {minutes}")
    os._exit(1)
