"""The calls of a step compiled for the slice, and the answer in the parent's folder."""

import glob
import json
import os
import queue
import threading
import time

from systolic_capture import arrays, bridge, calls, flops, memory, report, shardings, step_search

SCHEDULED = "after_optimizations.txt"
CODE = "after_codegen.txt"
"""The schedule with the compiler's cycles."""
USAGE = "after_optimizations-memory-usage-report.txt"
LAST = ("after_optimizations-memory-usage-report.pb", USAGE)
"""Files that are written behind the schedule; libtpu 0.0.10 writes the text alone."""
REFUSED = "oom_intermediate_module.txt"
MOST_BESIDE = 2
"""Programs beside the step that are compiled since they may not fit."""
MOST_HELD = 1000
"""Calls beside which different bytes are held, the largest of them, of which each device's are added up."""
ANEW = 0.5
"""Share of a function's calls that traced it again, above which it is told."""
LARGE_CONSTANT = 1 << 24
"""Bytes of arrays that a function refers to, from which it is told."""
POLL_SECONDS = 0.1
AT_ONCE = 8
"""Threads that compile: a program of which the schedule is enough goes on compiling while the next begins."""

_tasks = queue.Queue()


def _work():
    while True:
        task, over = _tasks.get()
        task()
        over.set()


def start():
    """Begins the threads that compile: since Python 3.12 none begins once the program has ended."""
    for _ in range(AT_ONCE):
        threading.Thread(target=_work, daemon=True).start()


def background(task):
    """Runs a function in one of those threads; returns an event that is set when it is over."""
    over = threading.Event()
    _tasks.put((task, over))
    return over


def answer(step, ended):
    """Compiles the calls of a step, writes the answer and ends the process."""
    try:
        content = _answer(step, ended)
        with open(os.path.join(report.FOLDER, "answer.json"), "w") as file:
            json.dump(content, file)
        report.say(done=True)
        code = 0
    except BaseException as error:
        import traceback

        traceback.print_exc()
        reason = " ".join(str(error).split())[:600]
        report.say(failed=f"{type(error).__name__}: {reason}")
        code = 1
    report.leave(code)


def _answer(step, ended):
    entries = calls.entries_of(step)
    distinct = list({entry.call.key: entry.call for entry in entries}.values())
    rare = [calls.entry(number).call for number, *_ in step.periodic]
    compiled = _programs([*distinct, *rare])
    programs = compiled[: len(distinct)]
    for call, program in zip(distinct, programs, strict=True):
        times = sum(entry.call is call for entry in entries)
        program |= {"calls_per_step": times, "held": _held(call, program.pop("ids"))}
    calls.cautions += _left_out(step)
    for lines in (_of_other_shapes, _traced_anew, _closing_over):
        calls.cautions += lines(distinct)
    name, version, lent = report.compiler()
    if os.environ.get(bridge.variable(), "").split() != bridge.flags().split():
        calls.cautions.append(
            f"the program changed {bridge.variable()} after {name} had read it, and was compiled with {bridge.flags() or 'no flags'}: "
            "set it before the first use of jax.devices()"
        )
    periodic = []
    for call, program, (_, count, every) in zip(
        rare, compiled[len(distinct) :], step.periodic, strict=True
    ):
        held = _held(call, program.pop("ids"))
        periodic.append({**program, "calls": count, "every": every, "held": held})
    known = {call.key for call in (*distinct, *rare)}
    beside = []
    for call in calls.large_beside(known, report.request().device_bytes, MOST_BESIDE):
        try:
            program = _program(call, len(programs) + len(periodic) + len(beside))
        except Exception:  # the program's own affair: its step compiles
            continue
        beside.append({**program, "held": _held(call, program.pop("ids"))})
    others = [
        {"name": other.name, "calls": count}
        for key, (other, count) in calls.counts().items()
        if key not in known
    ]
    return {
        "programs": programs,
        "order": calls.order(step, distinct),
        "periodic": periodic,
        "beside": beside,
        "held": calls.largest_held(step),
        "outside": calls.outside(),
        "others": others,
        "operations_per_step": calls.operations_in(step),
        "moves": calls.moved_in(step),
        "ended": ended,
        "notes": calls.notes,
        "cautions": calls.cautions,
        "versions": {
            **{name: report.version_of(name) for name in ("jax", "jaxlib")},
            name: version,
        },
        "lent_compiler": lent,
        "flags": bridge.flags(),
    }


def _left_out(step):
    """A line with what repeats and is no part of a step, and its share; empty of little, and of a step that was chosen alone."""
    share, names = calls.share_beside(step)
    if share < step_search.RARE:
        return []
    most = [f"{name} ({times:,})" for name, times in names.most_common(3)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    bound = ""
    if sum(times for _, times in calls.counts().values()) > step_search.LONGEST:
        bound = f"; a step of more than {step_search.LONGEST:,} calls is not looked for"
    return [
        f"the step leaves out {', '.join(most)}{more}: {100 * share:.2g} % of the FLOPs and bytes of all recorded calls{bound}; --step NAME takes another function for the step"
    ]


def _of_other_shapes(step_calls):
    """A line for each function of a step that was called with other arguments too, often enough not to be a last batch."""
    lines = []
    keys = {call.key for call in step_calls}
    every = list(calls.counts().values())
    for call in step_calls:
        alike = [
            pair for pair in every if (pair[0].name, pair[0].source) == (call.name, call.source)
        ]
        total = sum(times for _, times in alike)
        others = sum(times for other, times in alike if other.key not in keys)
        if not call.source or others < max(2, calls.OFTEN * total):
            continue
        mean = sum(other.flops * times for other, times in alike) / total
        ratio = (
            f"; by FLOPs its mean call is {mean / call.flops:.3g} times this one"
            if call.flops
            else ""
        )
        lines.append(
            f"{call.name} was called with {len(alike)} kinds of arguments, and the step is of one of them, {total - others} of {total} calls ({_shapes(call)}){ratio}"
        )
    return list(dict.fromkeys(lines))


def _shapes(call):
    """Shapes of the last arguments of a call: weights stand first by custom, and batches last."""
    return ", ".join(str(arg.aval.str_short()) for arg in call.args[-2:])


def _traced_anew(step_calls):
    """A line for each function of a step that was traced again at nearly each of its calls."""
    every = dict(calls.counts().values())
    return [
        f"{call.name} was traced anew {call.traces} times in {every[call]} calls, as a function that is jitted within the loop is: each time is a compile on the slice, which the step leaves out; call jax.jit once, before the loop"
        for call in step_calls
        if call.traces > max(2, ANEW * every[call])
    ]


def _closing_over(step_calls):
    """A line for each function of a step that refers to large arrays of the slice."""
    if shardings.hoists():
        return []
    lines = []
    for call in step_calls:
        values = call.closed_over
        size = sum(value.nbytes for value in values)
        if size < LARGE_CONSTANT:
            continue
        text = f"{call.name} refers to {size / 2**20:,.0f} MiB of arrays that are not its arguments: jax {report.version_of('jax')} writes them into the program as constants, whole on each device and beside the arrays themselves"
        if not arrays.can_be_written(values):
            text += ", which are taken here as arguments that are whole on each device"
        if not all(value.is_fully_addressable for value in values):
            text += "; it refuses those that lie on devices of other processes, and the program fails there"
        lines.append(f"{text}; give them as arguments")
    return lines


def _held(call, ids):
    """The most that the program holds beside the arguments of one of the calls of a kind, in bytes of a device."""
    host_of = {device.id: device.process_index for device in bridge.slice_devices()}
    others = set(host_of) - set(ids)
    held = {frozenset(entry.held.items()) for entry in calls.alike(call)}
    if len(held) > MOST_HELD:
        held = sorted(held, key=lambda places: -sum(size for _, size in places))[:MOST_HELD]
    sizes = [memory.on_devices(dict(places), ids, others, host_of) for places in held]
    return {name: max(size[name] for size in sizes) for name in sizes[0]}


def _programs(several):
    """Programs of calls, in their order. The smallest is compiled first: libtpu begins none while it generates code for a large one."""
    programs = {}
    sizes = [(call.flops, call.eqns, number) for number, call in enumerate(several)]
    for *_, number in sorted(sizes):
        programs[number] = _program(several[number], number)
    return [programs[number] for number in range(len(several))]


def _program(call, number):
    report.say(stage=f"lowering {call.name}")
    began = time.monotonic()
    lowered = call.lower()
    lowering = time.monotonic() - began
    devices = calls.device_assignment(lowered)
    _on_first_slice(lowered, devices)
    folder = os.path.join(report.FOLDER, f"dump{number}")
    os.makedirs(folder)
    report.say(stage=f"compiling {call.name}")
    began = time.monotonic()
    text, refused = _compiled(lowered, call.options, folder)
    path = os.path.join(report.FOLDER, f"program{number}.txt")
    with open(path, "w") as file:
        file.write(text)
    usage = _written(folder, USAGE)
    if usage is not None:
        with open(usage) as source, open(f"{path}.{USAGE}", "w") as file:
            file.write(source.read())
    return {
        "name": call.name,
        "text": os.path.basename(path),
        "refused": refused,
        "flops": call.flops,
        "needed_flops": flops.needed(call),
        "flops_are_least": call.flops_are_least,
        "open_loops": list(call.open_loops),
        "places": [
            [device.id]
            if report.request().gpu
            else [
                *(*device.coords, 0, 0)[:3],
                device.core_on_chip,
                getattr(device, "slice_index", 0) or 0,
            ]
            for device in devices
        ],
        "ids": [device.id for device in devices],
        "copies": bridge.num_processes() if bridge.is_of_each_process(devices) else 1,
        "mesh": _mesh(call, devices),
        "seconds": {"lower": round(lowering, 3), "compile": round(time.monotonic() - began, 3)},
    }


def _on_first_slice(lowered, devices):
    """Gives a program of a later slice alone the devices of the first in their places: libtpu compiles for no other alone."""
    if report.request().gpu:
        return
    own = {getattr(device, "slice_index", 0) or 0 for device in devices}
    if len(own) != 1 or own == {0} or not hasattr(lowered, "_device_list"):
        return
    place = {
        (*device.coords, device.core_on_chip): device
        for device in bridge.slice_devices()
        if not device.slice_index
    }
    alike = tuple(place[(*device.coords, device.core_on_chip)] for device in devices)
    lowered._device_list = type(lowered._device_list)(alike)


def _mesh(call, devices):
    """Axes of the mesh whose devices the program has in their order; empty without one."""
    meshes = [call.mesh, shardings.mesh_of(call.args)]
    for mesh in filter(bridge.is_concrete, meshes):
        if tuple(mesh.devices.flat) == tuple(devices):
            return {str(name): int(size) for name, size in mesh.shape.items()}
    return {}


def _compiled(lowered, options, folder):
    """The scheduled module, and the compiler's words where it did not fit."""
    options = {
        **_own_options(),
        **options,
        "xla_dump_to": folder,
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_as_proto": True,
    }
    quick = report.request().quick
    failed, compiled = [], []

    def run():
        try:
            compiled.append(lowered.compile(compiler_options=options))
        except BaseException as error:
            failed.append(error)

    over = background(run)
    size = -1
    while not over.wait(POLL_SECONDS):
        path = (
            _written(folder, SCHEDULED)
            if quick and any(_written(folder, name) for name in LAST)
            else None
        )
        if path is not None:
            now = os.path.getsize(path)
            with open(path) as file:
                # libtpu 0.0.10 names the module behind the last brace.
                text = file.read()
            if now == size and "\nENTRY " in text and text.rstrip().rpartition("\n")[2][:1] == "}":
                return text, ""
            size = now
    if compiled:
        return _text(compiled[0], folder), ""
    reason = f"{type(failed[0]).__name__}: {failed[0]}"
    path = _written(folder, REFUSED)
    if path is None:
        raise failed[0]
    with open(path) as file:
        return file.read(), reason[:4000]


def _own_options():
    """Compile options of a GPU that is not there, as the parent has them, where the user's flags leave them open."""
    gpu = report.request().gpu
    own = {flag.partition("=")[0] for flag in bridge.flags().split()}
    return {
        name: value
        for name, value in (gpu["options"] if gpu else {}).items()
        if f"--{name}" not in own
    }


def _text(compiled, folder):
    """The scheduled text: the compiler's, or its dump where an older jaxlib can't read what a newer libtpu answers."""
    try:
        return compiled.as_text()
    except Exception:
        path = _written(folder, CODE) or _written(folder, SCHEDULED)
        if path is None:
            raise
        with open(path) as file:
            return file.read()


def _written(folder, ending):
    """The largest dump with an ending, which is the program's."""
    dumps = sorted(glob.glob(os.path.join(folder, f"*{ending}")), key=os.path.getsize)
    return dumps[-1] if dumps else None
