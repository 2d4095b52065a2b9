"""The calls of jitted functions on the slice, recorded until :mod:`step_search` finds a step among them."""

import atexit
import collections
import functools
import gc
import itertools
import os
import sys
import threading
import time
from typing import Any

from systolic_capture import (
    arrays,
    bodies,
    bridge,
    dispatch,
    flops,
    memory,
    moves,
    report,
    shardings,
    step_search,
)

LIKELY_CALLS = 40
"""Calls after which a repeated sequence may be the step of a program that ends with others; three repeats of several functions are enough."""
SEARCHES, SEARCH_SECONDS = 32, 0.25
"""The step is sought when a call in so many more has come, which is at each of the first, and after so many seconds."""
SURE_CALLS = 2000
"""Calls after which a repeated sequence is taken for the step, whatever the time: fewer may be the layers of a step, what
fills a buffer before the first one, or a first phase of the program."""
SURE_SECONDS = 4.0
"""Seconds after which it is taken."""
UNSURE_CALLS, UNSURE_SECONDS = 10_000, 20.0
"""The same where calls have large arguments that stay the same, since a step may gather gradients of several batches before
it changes the weights; and where they have no matmul, since they may make what the step takes."""

PLACED = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "compiler_options_kvs")
"""Parameters of jit that make another program of one body."""

COLLECTED = frozenset((0, *(1 << n for n in range(12))))
"""Calls at which garbage is collected, and arrays that were computed are counted: a training run collects it sooner or later, and this is its beginning."""
OFTEN = 0.05
"""Share of a function's calls with other arguments, above which it is told."""
LARGE = 0.9
"""Share of a device's memory, above which a program beside the step is compiled to see whether it fits."""
NO_ARRAYS = (0, 0, -1, ())
"""The most bytes that a program holds beside a call, those when the largest arrays were noted, the number of the call, and these arrays."""

_lock = threading.RLock()
_known = {}
_places = {}
"""Shardings of the results of each kind of call, of jax's own functions too."""
_sequence = []
_operations = {}
_likely = {}
"""Sequences that repeated for long enough to be the step: FLOPs of all that repeated, and the number of calls until then."""
_after = []
"""Calls behind the step of a program that ended with others."""
_state: dict[str, Any] = {"ended": False, "error": "", "ours": False, "due": 0, "again": 0.0}
notes = []
"""Notes of the answer."""
cautions = []
"""Notes that stand before all others."""


class Call:
    """One call of a jitted function: what is needed to lower it, and the shapes of its results."""

    most, devices, own = NO_ARRAYS, None, False
    source, mesh, places, options = "", None, None, {}
    ids, after, taken, held, links = (), (), frozenset(), {}, (frozenset(), frozenset())

    def __init__(self, args, params, own):
        body = shardings.Inner(params["jaxpr"])
        name = str(params.get("name") or "jit")
        self.name = bodies.name_of(params["jaxpr"], name)
        flow = bodies.flow_in(params["jaxpr"], name)
        self.source = body.source if flow is None else shardings.Inner(flow).source
        self.own = own
        self.params = dict(params)
        self.mesh = shardings.context_mesh()
        self.args = [
            arg.without_memory() if arrays.is_slice_array(arg) else _of_host(arg) for arg in args
        ]
        self.values = list(args)
        self.jaxpr = params["jaxpr"]
        self.fingerprint = bodies.fingerprint(params["jaxpr"])
        self._hoist(body)
        self.key = (
            self.name,
            self.source,
            tuple((str(arg.aval), arg.sharding if arg._committed else None) for arg in self.args),
            tuple(params.get("donated_invars", ())),
            self.fingerprint,
            tuple(_hashable(params.get(name)) for name in PLACED),
        )
        self.eqns = len(body.jaxpr.eqns)
        kept = [value for value, own in zip(self.values, self.kept, strict=True) if own]
        take(self, args, kept, self.loose[-len(args) :] if args else ())

    @functools.cached_property
    def kept(self):
        """Whether the compiled program has each of the arguments."""
        known = _known.get(self.key)
        return bodies.kept(self.params) if known is None else known.kept

    @functools.cached_property
    def loose(self):
        """Sharding to which it takes each argument that is committed nowhere; empty of jax's own functions."""
        if self.own:
            return ()
        known = _known.get(self.key)
        if known is not None:
            return known.loose
        places = shardings.of_loose(self.args, self.params, self.mesh)
        return [where if own else None for where, own in zip(places, self.kept, strict=True)]

    def _constant(self, value):
        """An array that the function refers to, as an argument: on one device it goes wherever the call does."""
        if not arrays.is_slice_array(value) or len(value.sharding.device_set) == 1:
            return _of_host(value)
        if shardings.hoists() or not hasattr(value.sharding, "mesh"):
            return value.without_memory()
        whole = shardings.replicated(value.sharding.mesh)
        return dispatch.stand_in(value.aval, whole, buffer=False)

    def _hoist(self, body):
        """Makes arguments of arrays on the slice that the function refers to, where jax does, or their values matter too much.

        By default jax writes them into the program: each device has a copy, beside the arrays themselves.
        """
        self.closed_over = [
            value.without_memory() for value in body.consts if arrays.is_slice_array(value)
        ]
        if not self.closed_over:
            return
        hoists = shardings.hoists()
        if not hoists and arrays.can_be_written(self.closed_over):
            return
        from jax._src import sharding_impls
        from jax._src.interpreters import partial_eval

        count = len(body.consts)
        self.params["jaxpr"] = partial_eval.close_jaxpr(
            partial_eval.convert_constvars_jaxpr(body.jaxpr)
        )
        self.args = [self._constant(const) for const in body.consts] + self.args
        self.values = [*(body.consts if hoists else [None] * count), *self.values]
        for name, filler in (
            ("in_shardings", sharding_impls.UNSPECIFIED),
            ("in_layouts", None),
            ("donated_invars", False),
        ):
            if name in self.params:
                self.params[name] = (filler,) * count + tuple(self.params[name])

    @property
    def body(self):
        """Operations of the function, whose constants are variables beside its arguments."""
        return shardings.Inner(self.jaxpr).jaxpr

    @functools.cached_property
    def flops(self):
        """FLOPs of the matmuls and convolutions of the body, over all devices."""
        return flops.of_jaxpr(self.body)

    @property
    def traces(self):
        """How often its body was traced; 0 of an operation that jax calls by itself."""
        return bodies.traces.get(self.fingerprint, 0) if "unknown" not in self.source else 0

    @property
    def flops_are_least(self):
        """Whether some of them are in loops of unknown length, counted once."""
        return flops.in_open_loops(self.body)

    @property
    def open_loops(self):
        """Loops of unknown length with matmuls."""
        return flops.open_loops(self.body)

    def results(self):
        """The results in shape alone."""
        avals = [var.aval for var in self.body.outvars]
        places = _places.get(self.key)
        if places is None:
            places = _places[self.key] = shardings.of_results(
                self.args,
                self.params,
                self.mesh,
                dispatch.first_device,
                shardings.Partitions(self.name, self.jaxpr, self.lower),
            )
        self.places = places
        # A result that is an argument is a copy: jax forwards none of its top-level calls', from 0.5 to 0.12.
        return [
            dispatch.stand_in(shardings.placed(aval, where[0]), *where)
            for aval, where in zip(avals, places, strict=True)
        ]

    def donate(self):
        """Frees the memory of the arguments that it donates."""
        donated = self.params.get("donated_invars") or ()
        if any(donated):
            flags = [gone and own for gone, own in zip(donated, self.kept, strict=False)]
            arrays.donate(zip(self.values, flags, strict=False), self.body.outvars, self.places)
        self.values = []

    def lower(self):
        """The call lowered for the slice."""
        from jax._src import pjit
        from jax._src.interpreters import mlir

        convert = getattr(pjit, "convert_to_metaty", lambda arg: arg)
        args = [convert(arg) for arg in self.args]
        return pjit._resolve_and_lower(
            args,
            **self.params,
            lowering_platforms=(bridge.lowering_platform(),),
            lowering_parameters=mlir.LoweringParameters(),
            pgle_profiler=None,
        )


def _hashable(value):
    """A parameter of jit as a part of a key."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def take(call, args, kept, loose=()):
    """Notes what a call takes, and what the program holds beside that.

    Args:
        call: The call.
        args: Its arguments.
        kept: Values that the compiled program has for arguments.
        loose: Where the call takes each of ``args`` that is committed nowhere: where that is elsewhere, the program has a
            copy for its argument, which each call makes anew.
    """
    call.ids, call.links = arrays.serials(args), arrays.links(args)
    call.sources = arrays.sources(kept)
    call.sources.join(arrays.awaited())
    call.after = list(call.sources.calls.values())
    copied = set()
    kept_ids = set(map(id, kept))
    places: list[Any] = list(loose) or [None] * len(args)
    for value, where in zip(args, places, strict=True):
        if id(value) not in kept_ids:
            continue
        if not arrays.is_slice_array(value):
            moves.count_fed(dispatch.aval_of(value), where or dispatch.first_device())
        elif where and not value._committed and value.sharding.device_set != where.device_set:
            copied.add(id(value))
            call.sources.join(moves.count(value, where, "spread"))
    taken = [value for value in kept if arrays.is_slice_array(value) and id(value) not in copied]
    call.taken = {array.buffer.number for array in taken if array.buffer}
    call.held = {}
    if not call.own:
        collect(frozenset(map(id, args)))
        call.held = memory.beside(taken)
        _note_most(call)


def _note_most(call):
    """Notes what is held beside a call where it is the most beside those of its kind."""
    known = _known.get(call.key, call)
    size, noted, _, named = known.most
    if (now := sum(call.held.values())) > size:
        # The largest arrays are sorted out where there are clearly more.
        if now > (1 + OFTEN) * noted:
            noted, named = now, memory.largest(memory.LARGEST, call.taken)
        known.most = now, noted, len(_sequence), named


def _of_host(value):
    """Stands for an argument from the host."""
    return arrays.array_class()(
        dispatch.aval_of(value), dispatch.first_device(), False, buffer=False
    )


def note(text):
    """Adds a note to the answer, once."""
    if text not in notes:
        notes.append(text)


def caution(text):
    """Adds a caution to the answer, once."""
    if text not in cautions:
        cautions.append(text)


def count_operation(name):
    """Counts an operation outside of jit on arrays of the slice."""
    with _lock:
        _operations[name] = _operations.get(name, 0) + 1


def device_assignment(lowering):
    """Devices of a lowered program in its order."""
    devices = getattr(lowering, "_device_list", None)
    if devices is None:
        devices = lowering.compile_args.get("device_assignment")
    return tuple(devices or ())


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
        _state["ours"] = _is_ours(trace) and not getattr(error, "is_of_program", False)
        real(kind, error, trace)

    sys.excepthook = hook
    limit = report.request().limit_seconds
    timer = threading.Timer(limit, _at_limit, (limit,))
    timer.daemon = True
    timer.start()


def _is_ours(trace):
    """Whether an error comes from a line of the capture, rather than of the program or of jax."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__)


def record(call):
    """Adds a call to the sequence, and ends the program when its step is known.

    Returns:
        The origins of its results; None of jax's own.
    """
    if call.own:
        count_operation(call.name)
        return None
    with _lock:
        known = _known.setdefault(call.key, call)
        ends = moves.before_call(_devices_of(known, call), call.sources)
        source = arrays.Origins({known: len(_sequence)}, ends)
        if _state["ended"]:
            return source
        now = time.monotonic()
        if not _sequence:
            report.say(stage="running until a step repeats")
        _sequence.append(
            step_search.RecordedCall(known, now, sum(_operations.values()), call, moves.so_far())
        )
        if (step := _settled(now)) is not None:
            _state["ended"] = True
    if step is not None:
        from systolic_capture import compiling

        compiling.answer(step, "stopped when its step had repeated")
    return source


def _devices_of(known, call):
    """Devices of a kind of calls."""
    if known.devices is None:
        places = [where[0] if isinstance(where, tuple) else where for where in call.places or ()]
        places += [arg.sharding for arg in call.args]
        known.devices = frozenset().union(
            *(where.device_set for where in places if bridge.is_sharding(where))
        )
    return known.devices


def collect(given_ids):
    """Collects garbage before a call at some numbers of calls."""
    with _lock:
        if len(_sequence) in COLLECTED and not _state["ended"]:
            gc.collect()
            memory.count_small(given_ids)


def _settled(now):
    """The step once it has repeated for long enough; None before."""
    if len(_sequence) < _state["due"] and now < _state["again"]:
        return None
    step = _sought(now)
    ended = time.monotonic()
    _state["due"] = len(_sequence) * (SEARCHES + 1) // SEARCHES
    _state["again"] = ended + max(SEARCH_SECONDS, SEARCHES * (ended - now))
    return step


def _sought(now):
    chosen = report.request().step
    if threads := () if chosen else step_search.of_threads(_sequence):
        sure = [_is_sure(thread.sequence, thread.length, now) for thread in threads]
        return _beside_each_other(threads) if all(sure) else None
    length = step_search.period(_sequence)
    if length is None:
        return None
    if not (
        _has(_sequence[-length:], chosen) if chosen else step_search.is_linked(_sequence, length)
    ):
        return None
    times = step_search.repeats(_sequence, length)
    several = len(step_search.names_in(_sequence, length)) > 1
    if times * length >= LIKELY_CALLS or (several and times >= step_search.WHOLE):
        flops = times * sum(entry.call.flops for entry in _sequence[-length:])
        _likely[length, _sequence[-1].call.key] = (flops, len(_sequence))
    return _within(length) if _is_sure(_sequence, length, now) else None


def _is_sure(sequence, length, now):
    """Whether a sequence of calls has repeated for long enough to be the step."""
    end = len(sequence)
    repeats = sequence[-min(end, step_search.repeats(sequence, length) * length) :]
    waited = now - repeats[0].at
    if len(repeats) < 3 or (len(repeats) < SURE_CALLS and waited < SURE_SECONDS):
        return False
    last = range(end - length, end)
    unchanged = step_search.is_unchanged(sequence, last, [n - length for n in last])
    flops = any(entry.call.flops for entry in repeats[:length])
    least = (1 if unchanged else 2) * UNSURE_CALLS
    if (unchanged or not flops) and waited < UNSURE_SECONDS and len(repeats) < least:
        return False
    if unchanged and not report.request().step and not _follow_each_other(sequence, length):
        caution(
            "the large arguments of the step stayed the same from one to the next: of a program that gathers gradients of many batches, "
            "this is one of them; --step takes another function"
        )
    return True


def _follow_each_other(sequence, length):
    """Whether the largest call of a repeated sequence takes what the sequence before made, such as changed weights."""
    end = len(sequence)
    most = max(entry.call.flops for entry in sequence[-length:])
    return any(
        entry.call.flops == most and any(born >= end - 2 * length for born in entry.links[1])
        for entry in sequence[-length:]
    )


def _beside_each_other(threads):
    """The step of threads that run on devices of their own."""
    step = step_search.beside_each_other(threads)
    times = collections.Counter(_sequence[n].call.name for n in step.numbers)
    named = " beside ".join(f"{number} of {name}" for name, number in times.items())
    note(
        f"{len(threads)} threads run on devices of their own, and each has its own step: the time is that of the slowest, of {named} as often as they were called"
    )
    return step


def _has(entries, name):
    return any(entry.call.name == name for entry in entries)


def _within(length):
    """The step in a repeated sequence of that length."""
    chosen = report.request().step
    step = step_search.within(_sequence, length)
    if chosen and not _has([_sequence[n] for n in step.numbers], chosen):
        return _alone(chosen, _sequence[-length:])
    if step.evaluations:
        note(
            f"{', '.join(sorted(step.evaluations))} was called again and again on what the step makes, and makes nothing for it: it is taken for an evaluation, which the step leaves out; --step takes it for the step"
        )
    if step.skipped:
        names = [f"{name} ({step.skipped.count(name)})" for name in dict.fromkeys(step.skipped)]
        note(
            f"{', '.join(names)} beside each {step.times} steps, little by FLOPs and bytes, {'is' if len(step.skipped) == 1 else 'are'} not counted"
        )
    return step


def entries_of(step):
    """The recorded calls of a step; one that was never called stands for itself."""
    if step.numbers:
        return [_sequence[n] for n in step.numbers]
    return [step_search.RecordedCall(step.call, 0.0, 0, step.call)]


def share_beside(step):
    """Share of the work of all recorded calls that repeats and is no part of a step, and its functions; nothing beside a step
    that was chosen alone."""
    if step.alone or not step.numbers:
        return 0.0, {}
    return step_search.left_out(_sequence, step, _after)


def alike(call):
    """All recorded calls of a kind."""
    return [entry for entry in _sequence if entry.call is call] or [
        step_search.RecordedCall(call, 0.0, 0, call)
    ]


def entry(number):
    """A recorded call."""
    return _sequence[number]


def order(step, kinds):
    """The calls of a step in their order: which of ``kinds``, and the calls that it waits for, as place in the step and steps back."""
    index = {call.key: n for n, call in enumerate(kinds)}
    return [
        {"program": index[_sequence[number].call.key], "after": sorted(after)}
        for number, after in zip(
            step.numbers, step_search.waits(_sequence, step.numbers), strict=True
        )
    ]


def largest_held(step):
    """The largest arrays that the program holds beside those of a step, with the function that made each."""
    if not step.numbers:
        return []
    first, taken = step.numbers[0], set()
    for number in range(first, len(_sequence)):
        taken |= _sequence[number].taken
    held = [array for array in memory.largest(memory.LARGEST, taken) if array["born"] < first]
    # There may have been more beside an earlier call, which is gone.
    last = {entry.call: sum(entry.held.values()) for entry in entries_of(step)}
    most, _, at, then = max((call.most for call in last), key=lambda most: most[0])
    if most > max(last.values()):
        for entry in _sequence[max(0, at - len(step.numbers) + 1) : at + len(step.numbers)]:
            taken |= entry.taken
        held = [array for array in then if array["number"] not in taken]
    return named(held)


def outside():
    """The most that a device held outside of the recorded calls."""
    most = memory.outside()
    return {**most, "arrays": named(most["arrays"])}


def named(held):
    """Arrays with the functions that made them."""
    for array in held:
        born = array["born"]
        array["made_by"] = _sequence[born].call.name if 0 <= born < len(_sequence) else ""
    return held


def large_beside(known, capacity, most):
    """Programs of no step that may need more memory than a device has, those with the largest need first.

    Args:
        known: Keys of the programs that are compiled already.
        capacity: Bytes of a device.
        most: How many.
    """
    held = {}
    for entry in _sequence:
        if entry.call.key not in known:
            sizes = [size for (_, kind), size in entry.held.items() if kind not in memory.HOST]
            held[entry.call] = max(held.get(entry.call, 0), *sizes, 0)
    needs = {
        call: need
        for call, size in held.items()
        if (need := _need(call) + size) > LARGE * capacity > 0
    }
    return sorted(needs, key=lambda call: -needs[call])[:most]


def _need(call):
    """Bytes of a device that a program may need: its values split over its devices, and no less than its arguments and results."""
    if call.jaxpr is None:
        return 0
    avals = shardings.Inner(call.jaxpr).outvars_avals()
    results = [
        (aval, where[0] if isinstance(where, tuple) else where)
        for aval, where in zip(avals, call.places or (), strict=False)
    ]
    kept = [arg for arg, own in zip(call.args, call.kept, strict=True) if own]
    placed = [(arg.aval, arg.sharding) for arg in kept] + results
    least = sum(memory.part_bytes(aval, where) for aval, where in placed)
    devices = max((len(where.device_set) for _, where in placed), default=1)
    return max(least, bodies.live_bytes(call.jaxpr) // devices)


def operations_in(step):
    """Operations outside of jit from one recorded step to the next, on average."""
    pairs = _ends(step)
    return sum(end.operations - start.operations for start, end in pairs) / max(1, len(pairs))


def moved_in(step):
    """Bytes that are moved from one recorded step to the next, as :func:`moves.of_steps` has them; empty where one step alone is known."""
    return moves.of_steps([(start.moves, end.moves) for start, end in _ends(step)])


def _ends(step):
    """The last call of each recorded step with that of the step before: what other calls between them take is a part of it.

    Of a call alone it is what comes directly before it.
    """
    if not step.numbers:
        return []
    if step.alone:
        kind = _sequence[step.numbers[-1]].call
        return [pair for pair in itertools.pairwise(_sequence) if pair[1].call is kind]
    ends = step_search.ends_of(_sequence[: step.numbers[-1] + 1], step)
    return list(itertools.pairwise(_sequence[n] for n in ends))


def counts():
    """Calls by program, in the order of their first."""
    numbers = {}
    for entry in _sequence:
        numbers[entry.call.key] = numbers.get(entry.call.key, 0) + 1
    return {key: (_known[key], numbers.get(key, 0)) for key in _known}


def _best():
    """The step of a program that ended, or was stopped, before one was sure; None of one that called nothing."""
    chosen = report.request().step
    tallied = list(counts().values())
    if threads := () if chosen else step_search.of_threads(_sequence):
        return _beside_each_other(threads)
    length = step_search.period(_sequence)
    if chosen:
        if length is not None and _has(_sequence[-length:], chosen):
            return _within(length)
        return _alone(chosen, _sequence)
    linked = length is not None and step_search.is_linked(_sequence, length)
    repeats = length * step_search.repeats(_sequence, length) if linked else 0
    flops = sum(entry.call.flops for entry in _sequence[-repeats:]) if repeats else 0.0
    longest = max(_likely, key=lambda key: _likely[key], default=None)
    if longest is not None and (not linked or _likely[longest][0] > flops):
        # What came after it was of less work, such as a last evaluation.
        length, end = longest[0], _likely[longest][1]
        _after.extend(_sequence[end:])
        del _sequence[end:]
        return _within(length)
    if linked:
        return _within(length)
    repeated = [pair for pair in tallied if pair[1] > 1]
    if repeated:
        taken, times = max(repeated, key=_weight)
        if not _follows(taken):
            cautions.append(
                f"no step is known: no call takes what an earlier call of its kind made or took; {taken.name}, called {times} times, is taken for it; "
                "let the program do three steps or more, or choose with --step NAME"
            )
        return _one(taken)
    if not tallied:
        return None
    taken = max(tallied, key=lambda pair: (pair[0].flops, pair[0].eqns))[0]
    others = sorted({call.name for call, _ in tallied} - {taken.name})
    beside = f" of {', '.join([taken.name, *others])}" if others else ""
    cautions.append(
        f"the program repeated no jitted call, and no step is known: {taken.name}, the call with the most FLOPs{beside}, is taken for it; "
        "let the program do three steps or more, or choose with --step NAME"
    )
    return _one(taken)


def _weight(tallied):
    """Work of all calls of a kind, then how many there are."""
    call, times = tallied
    return times * call.flops, times


def _follows(call):
    """Whether calls of a kind take what others of it made or took."""
    own = {n: entry for n, entry in enumerate(_sequence) if entry.call is call}
    taken = [serial for entry in own.values() for serial in entry.links[0]]
    linked = any(born in own for entry in own.values() for born in entry.links[1])
    return linked or len(set(taken)) < len(taken)


def _one(call, **kwargs):
    """A step of one call, the last of its kind."""
    numbers = [n for n, entry in enumerate(_sequence) if entry.call is call]
    return step_search.CalledStep(numbers[-1:], call=call, **kwargs)


def _alone(name, entries):
    """A step of one call of a function, with a line that says what its calls are of others; None where it has none."""
    tallied = [pair for pair in counts().values() if pair[0].name == name]
    if not tallied:
        return None
    own = [entry for entry in entries if entry.call.name == name]
    others = collections.Counter(entry.call.name for entry in entries)
    del others[name]
    work = sum(entry.work for entry in entries)
    if others and own and work:
        most = sorted((-times, other) for other, times in others.items())[:3]
        beside = ", ".join(f"{-times:,} of {other}" for times, other in most)
        share = sum(entry.work for entry in own) / work
        cautions.append(
            f"the step is one call of {name}, as --step says: {len(own):,} beside {beside}, {100 * share:.2g} % of their FLOPs and bytes together"
        )
    return _one(max(tallied, key=_weight)[0], alone=True)


def _finish(ended):
    with _lock:
        if _state["ended"]:
            return
        _state["ended"] = True
        error = _state["error"]
        period = step_search.period(
            _sequence
        )  # of a program that failed, what is not linked is its initialization
        linked = period is not None and step_search.is_linked(_sequence, period)
        known = linked or report.request().step or step_search.of_threads(_sequence)
        step = _best() if known or not error else None
        names = sorted({call.name for call, _ in counts().values()})
        if error and not step:
            report.say(program_failed=error, ours=_state["ours"], called=names)
            return
        if error:
            ended = "failed"
            note(
                f"the program failed after {len(_sequence)} calls ({error}); the step is of what it called before"
            )
    from systolic_capture import compiling

    chosen = report.request().step
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
