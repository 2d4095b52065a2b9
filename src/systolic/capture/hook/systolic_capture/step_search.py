"""Which of the recorded calls are a step, and which come with some steps alone."""

import bisect
import collections
import copy
import itertools
import threading

LONGEST = 10_000
"""Most calls of a step."""
WHOLE = 3
"""Repeats from which a longer sequence that has more of the calls is the step, rather than what its end repeats."""
KEPT_SHARE = 0.05
"""Share of the bytes of a call's arguments that the call before had too: above it they are taken for weights that stayed."""
BESIDE = 0.1
"""Share of a repeated sequence's work: below it, what is beside steps within the sequence is no part of them."""
RARE = 0.02
"""Share of the work of the steps between its calls from which what comes with some steps alone has a line of its own."""
RECENT = 16
"""Steps of which calls are looked at for what they wait for, and back to which that matters."""
FLOPS_A_BYTE = 100.0
"""FLOPs that count as much as a byte of a call's arguments: chips do 66 (v2) to 560 (v6e) in the time that memory gives one."""


class RecordedCall:
    """A recorded call."""

    __slots__ = (
        "after",
        "at",
        "call",
        "held",
        "ids",
        "links",
        "moves",
        "operations",
        "taken",
        "thread",
    )

    def __init__(self, call, at, operations, now, moves=()):
        self.call = call
        """The first call of its kind."""
        self.at = at
        """Seconds of a clock."""
        self.operations = operations
        """Operations outside of jit before it."""
        self.moves = moves
        """Bytes that were moved on the slice before it."""
        self.ids, self.links, self.held, self.taken = now.ids, now.links, now.held, now.taken
        self.thread = threading.get_ident()
        self.after = now.after
        """Numbers of the calls that it waits for: that its arguments come from, or that the host has waited for."""

    @property
    def work(self):
        """FLOPs of its matmuls, and bytes of its large arguments in FLOPs."""
        return self.call.flops + FLOPS_A_BYTE * sum(size for _, size in self.ids)


class CalledStep:
    """A step: the numbers of its calls in the sequence, and what comes with some steps alone."""

    def __init__(self, numbers, periodic=(), skipped=(), times=0, call=None, alone=False):
        self.numbers, self.call = list(numbers), call
        self.alone = alone
        """Whether it is one call of a function that was chosen, whatever lies between two of them."""
        self.periodic = list(periodic)
        """Periodic calls, for each kind the number of its last, the calls at a time, and how many steps lie between two times."""
        self.skipped, self.times = skipped, times
        """Names of small calls that are beside that many steps, and in no list."""
        self.evaluations = set()
        """Names of functions that were called again and again after it, on what it makes."""


class ThreadCalls:
    """The calls of one thread, which repeat: their numbers in the whole sequence, and themselves with links to each other."""

    def __init__(self, sequence, numbers):
        self.numbers = numbers
        places = {number: place for place, number in enumerate(numbers)}
        self.sequence = []
        for number in numbers:
            entry = copy.copy(sequence[number])
            taken, born = entry.links
            entry.links = taken, frozenset(places.get(other, -1) for other in born)
            self.sequence.append(entry)
        self.length = period(self.sequence)

    @property
    def is_step(self):
        """Whether the last calls are a step of the thread."""
        return self.length is not None and is_linked(self.sequence, self.length)

    @property
    def devices(self):
        """Devices of the calls that repeat."""
        last = self.sequence[-self.length :]
        return frozenset().union(*(entry.call.devices or () for entry in last))


def of_threads(sequence):
    """The calls of each thread that repeat on devices of their own; empty unless two threads or more do: calls of one device
    are one after the other, whatever thread makes them."""
    numbers = {}
    for number in range(max(0, len(sequence) - WHOLE * LONGEST), len(sequence)):
        numbers.setdefault(sequence[number].thread, []).append(number)
    if len(numbers) < 2:
        return []
    threads = [ThreadCalls(sequence, own) for own in numbers.values()]
    threads = [thread for thread in threads if thread.is_step]
    devices = [thread.devices for thread in threads]
    apart = all(not one & other for one, other in itertools.combinations(devices, 2))
    return threads if len(threads) > 1 and apart and all(devices) else []


def beside_each_other(threads):
    """The steps of threads as one, each as often as the thread makes it while the rarest of them makes one."""
    steps = [within(thread.sequence, thread.length) for thread in threads]
    begin = max(thread.numbers[0] for thread in threads)
    counts = [
        max(1, sum(thread.numbers[n] >= begin for n in ends_of(thread.sequence, step)))
        for thread, step in zip(threads, steps, strict=True)
    ]
    numbers, periodic, skipped = [], [], []
    for thread, step, count in zip(threads, steps, counts, strict=True):
        times = max(1, round(count / min(counts)))
        own = collections.Counter(thread.sequence[n].call for n in step.numbers)
        for call, calls in own.items():
            places = [n for n, entry in enumerate(thread.sequence) if entry.call is call]
            numbers += [thread.numbers[n] for n in places[-times * calls :]]
        periodic += [(thread.numbers[n], calls, every / times) for n, calls, every in step.periodic]
        skipped += step.skipped
    joined = CalledStep(sorted(numbers), periodic, skipped, max(step.times for step in steps))
    joined.evaluations = set().union(*(step.evaluations for step in steps))
    return joined


def ends_of(sequence, step):
    """Numbers of the last calls of all steps that are like one."""
    call = sequence[step.numbers[-1]].call
    times = sum(sequence[n].call is call for n in step.numbers)
    return [n for n, entry in enumerate(sequence) if entry.call is call][::-1][::times][::-1]


def left_out(sequence, step, after=()):
    """Share of the work of all calls that repeats, or has more FLOPs than a step, and is no part of it, and how often each function
    is called.

    Args:
        sequence: The calls.
        step: The step in them.
        after: Further calls, behind them.
    """
    own = [sequence[n].call for n in (*step.numbers, *(n for n, *_ in step.periodic))]
    functions = {(call.name, call.source) for call in own}  # with other arguments, they have a line
    calls = [*sequence, *after]
    first = next(n for n, entry in enumerate(calls) if entry.call in own)
    flops = sum(sequence[n].call.flops for n in step.numbers)
    every, others = 0.0, {}
    for number, entry in enumerate(calls):
        # What comes before makes weights: its bytes are those of an initialization.
        work = entry.work if number >= first else entry.call.flops
        every += work
        if (entry.call.name, entry.call.source) not in functions:
            others.setdefault(entry.call, []).append(work)
    others = {call: works for call, works in others.items() if len(works) > 1 or call.flops > flops}
    names = collections.Counter()
    for call, works in others.items():
        names[call.name] += len(works)
    return sum(map(sum, others.values())) / (every or 1.0), names


def period(sequence, least=1):
    """Length of the sequence of calls, ``least`` or more, that the last ones repeat; None without one.

    It is the shortest, as of a loop. A longer one that repeats three times or more, hands on what it makes and reaches
    further back has that loop within: the microbatches before an update, or a critic's steps before a generator's. One
    function alone has batches of several lengths, and each is a step.
    """
    recent = sequence[-WHOLE * LONGEST :]
    same = _same([id(entry.call) for entry in reversed(recent)])  # as those so many calls before
    if len(same) < 3:
        return None
    lengths = range(max(1, least), len(same) // 2 + 1)
    shortest = next((length for length in lengths if same[length] >= length), None)
    if shortest is None:
        return None
    covered = {
        length: length + same[length]
        for length in lengths
        if same[length] >= (WHOLE - 1) * length
        and length + same[length] > shortest + same[shortest]
    }
    for length in sorted(covered, key=lambda length: (-covered[length], length)):
        if len(names_in(sequence, length)) > 1 and hands_on(sequence, length):
            return length
    return shortest


def names_in(sequence, length):
    """Names of the last calls."""
    return {entry.call.name for entry in sequence[-length:]}


def _same(kinds):
    """For each place, how many kinds from there on are as from the first: the Z-function, in linear time."""
    end = len(kinds)
    same = [0] * end
    left = right = 0
    for at in range(1, end):
        known = min(right - at, same[at - left]) if at < right else 0
        while at + known < end and kinds[known] == kinds[at + known]:
            known += 1
        if at + known > right:
            left, right = at, at + known
        same[at] = known
    return same


def repeats(sequence, length):
    """How often the last calls repeat."""
    pairs = zip(
        reversed(sequence), itertools.islice(reversed(sequence), length, None), strict=False
    )
    same = itertools.takewhile(lambda pair: pair[0].call.key == pair[1].call.key, pairs)
    return 1 + sum(1 for _ in same) // length


def is_linked(sequence, length):
    """Whether the last of the repeated sequences takes what the one before made or took: not so where the same function
    initializes one array after the other."""
    if hands_on(sequence, length):
        return True
    now, before = sequence[-length:], sequence[-2 * length : -length]
    taken = frozenset().union(*(entry.links[0] for entry in before))
    return any(taken & entry.links[0] for entry in now)


def hands_on(sequence, length):
    """Whether the last of the repeated sequences takes what the one before made."""
    start = len(sequence) - 2 * length
    return any(
        start <= born < start + length for entry in sequence[-length:] for born in entry.links[1]
    )


def is_unchanged(sequence, now, before, constant=frozenset()):
    """Whether one of some calls has, by bytes, large arrays that the call before had and that are not constant."""
    for n, b in zip(now, before, strict=True):
        known = {serial for serial, _ in sequence[b].ids} - constant
        same = sum(size for serial, size in sequence[n].ids if serial in known)
        if same > KEPT_SHARE * sum(size for _, size in sequence[n].ids):
            return True
    return False


def within(sequence, length):
    """The step inside of a repeated sequence: all of it, but for what comes with some of its steps alone."""
    main = _before_evaluation(sequence, length)
    if main is None:
        return _chain(sequence, length) or _small(sequence, length)
    rest, last = main
    if longer := period(sequence, least=len(sequence) - len(rest) + 1):  # with the steps before it
        return _chain(sequence, longer) or _small(sequence, longer)
    inner = period(rest)
    step = within(rest, inner) if inner and is_linked(rest, inner) else CalledStep([last])
    step.evaluations |= names_in(sequence, length) - {sequence[n].call.name for n in step.numbers}
    return step


def _before_evaluation(sequence, length):
    """The sequence without calls at its end that only take what steps made, and the number of the last of these steps; None
    where it ends with steps."""
    kinds = {entry.call.key for entry in sequence[-length:]}
    takers = _takers(sequence, range(len(sequence)))
    # A loop that makes what the step takes, such as episodes of its policy, is a part of it.
    feeds = set().union(*(_reached(takers, key) for key in kinds))
    makers = {
        sequence[n].call.key: n for entry in sequence[-length:] for n in entry.links[1] if n >= 0
    }
    steps = {
        key: n
        for key, n in makers.items()
        if key in _reached(takers, key)
        and key not in feeds
        and not _fills(sequence, takers, key, kinds)
    }
    if not steps:
        return None
    start = len(sequence)
    while sequence[start - 1].call.key in kinds:
        start -= 1
    return sequence[:start], max(steps.values())


def _fills(sequence, takers, key, kinds):
    """Whether a cycle of calls does little beside the calls after it, as what fills a buffer for the steps does."""
    flops = {entry.call.key: entry.call.flops for entry in sequence}
    cycle = [other for other in _reached(takers, key) if key in _reached(takers, other)]
    return sum(flops[other] for other in cycle) < BESIDE * sum(flops[other] for other in kinds)


def _small(sequence, length):
    """The steps inside of a sequence that has little beside them, as of a log after each ten; else the sequence."""
    end = len(sequence)
    whole = range(end - length, end)
    total = sum(sequence[n].work for n in whole)
    for inner, last, times in _runs(sequence, length):
        now = range(last - inner, last)
        inside = min(times, length // inner)
        beside = total - inside * sum(sequence[n].work for n in now)
        if beside > BESIDE * total:
            continue
        if _are_layers(sequence, whole, {sequence[n].call.key for n in now}):
            continue
        constant = _constant(sequence, length, last)
        if not is_unchanged(sequence, now, range(last - 2 * inner, last - inner), constant):
            run = {n % length for n in range(last - inside * inner, last)}
            left = [sequence[n].call.name for n in whole if n % length not in run]
            return CalledStep(now, skipped=left, times=times)
    return CalledStep(whole)


def _runs(sequence, length):
    """Sequences that repeat three times or more within a repeated one and have nearly all of its work: the length, the end and
    how often, the shortest first.

    Such a run has the call at a quarter of the work, or that at three quarters.
    """
    start = len(sequence) - 2 * length
    recent = sequence[start:]
    kinds = [id(entry.call) for entry in recent]
    sums = [0.0, *itertools.accumulate(entry.work for entry in recent)]
    total = sums[-1] - sums[length]
    quarters = [
        bisect.bisect_left(sums, sums[length] + share * total) - 1 for share in (0.25, 0.75)
    ]
    around = [_RunsAround(kinds, place + back) for place in quarters for back in (0, -length)]
    seen = []
    for inner in range(1, length // 3 + 1 if total else 0):
        if any(inner % shorter == 0 for shorter in seen):
            continue  # the same run
        ends = {}
        for first, last in (run for place in around for run in place.runs(inner)):
            first = max(first, last - length)
            if last - first >= 3 * inner and sums[last] - sums[first] >= (1 - BESIDE) * total:
                ends |= {end: (end - first) // inner for end in range(last - inner + 1, last + 1)}
        seen += [inner] * bool(ends)
        for end in sorted(ends, reverse=True):
            if end > length and ends[end] >= 3:
                yield inner, start + end, ends[end]


class _RunsAround:
    """Runs around a place in a sequence of kinds."""

    def __init__(self, kinds, place):
        self._place, self._end = place, len(kinds)
        self._behind = _same([*kinds[place:], None, *kinds])
        self._before = _same([*kinds[:place][::-1], None, *kinds[::-1]])

    def runs(self, inner):
        """The first and last places of what repeats with a length: that with the place in its first part, and with it in its last."""
        place, far = self._place, self._end + 1 - inner
        if place + inner <= self._end:
            yield place - self._before[far], place + inner + self._behind[inner]
        if place >= inner:
            yield place - inner - self._before[inner], place + self._behind[far]


def _are_layers(sequence, whole, kinds):
    """Whether calls of some kinds take each other's results within a sequence, and none of the sequence before it."""
    links = [
        born
        for n in whole
        if sequence[n].call.key in kinds
        for born in sequence[n].links[1]
        if born >= 0 and sequence[born].call.key in kinds
    ]
    return any(born in whole for born in links) and not any(
        whole.start - len(whole) <= born < whole.start for born in links
    )


def _constant(sequence, length, end):
    """Arrays that the sequence before the one that ends there had, which do not change with a step: a batch that is used again."""
    before = sequence[max(0, end - 2 * length) : end - length]
    return {serial for entry in before for serial, _ in entry.ids}


def _chain(sequence, length):
    """The step by what its calls take of each other; None where the sequence is one step.

    A step changes what the next one takes. An evaluation takes what steps made, and none takes what it makes.
    """
    end = len(sequence)
    whole = range(end - length, end)
    main = _main(sequence, length)
    chain = [n for n in whole if sequence[n].call.key in main]
    size = _cycle([sequence[n].call.key for n in chain])
    if size is None:
        return None
    groups = [chain[at : at + size] for at in range(0, len(chain), size)]
    before = [[n - length for n in groups[-1]], *groups]
    if not all(
        any(born in last for n in now for born in sequence[n].links[1])
        for last, now in itertools.pairwise(before)
    ):
        return None  # the layers of one step
    if is_unchanged(sequence, groups[-1], groups[-2], _constant(sequence, length, end)):
        return None
    starts = [group[0] for group in groups[1:]]
    parts = [[] for _ in groups]
    for n in whole:
        if sequence[n].call.key not in main:
            parts[bisect.bisect_left(starts, n) if n > chain[0] else -1].append(n)
    kinds = dict.fromkeys(sequence[n].call.key for part in parts for n in part)
    rare, step = [], [*groups[-2]]
    for key in kinds:
        numbers = [[n for n in part if sequence[n].call.key == key] for part in parts]
        if len({len(part) for part in numbers}) == 1:
            step += numbers[-2]
        else:
            rare.append(numbers)
    if not rare:
        return CalledStep(sorted(step)) if len(step) < length else None
    return _sorted_out(sequence, sorted(step), rare)


def _sorted_out(sequence, step, rare):
    """The step, and what is beside it: what is small is only named."""
    times = len(rare[0])
    least = RARE * times * sum(sequence[n].work for n in step)
    periodic, skipped = [], []
    for parts in rare:
        calls = sum(map(len, parts))
        number = max(n for part in parts for n in part)
        if calls * sequence[number].work < least:
            skipped += calls * [sequence[number].call.name]
            continue
        visits = sum(map(bool, parts))
        periodic.append((number, calls / visits, times / visits))
    return CalledStep(step, periodic, skipped, times)


def _main(sequence, length):
    """Kinds of calls that change what they take again, and those whose results these take."""
    end = len(sequence)
    takers = _takers(sequence, range(end - length, end), end - 2 * length)
    behind = {key: _reached(takers, key) for key in takers}
    cyclic = {key for key, keys in behind.items() if key in keys}
    # Not what another cycle is the source of: an evaluation that adds up its own results.
    first = {
        key
        for key in cyclic
        if all(other in behind[key] for other in cyclic if key in behind[other])
    }
    return first | {key for key, keys in behind.items() if keys & first}


def _takers(sequence, numbers, first=0):
    """For each kind of call those that take what it made since the call ``first``."""
    keys = {}
    for number in numbers:
        for born in sequence[number].links[1]:
            if born >= first:
                keys.setdefault(sequence[born].call.key, set()).add(sequence[number].call.key)
    return keys


def _reached(takers, key):
    reached, todo = set(), [key]
    while todo:
        for other in takers.get(todo.pop(), ()):
            if other not in reached:
                reached.add(other)
                todo.append(other)
    return reached


def _cycle(keys):
    """Length of the shortest sequence that some keys are two or more of; None without one."""
    for size in range(1, len(keys) // 2 + 1):
        if len(keys) % size == 0 and keys == keys[:size] * (len(keys) // size):
            return size
    return None


def waits(sequence, numbers):
    """For each call of a step the calls that it waits for, as place in the step and steps back, and as in most of the last steps."""
    places = {}
    for place, number in enumerate(numbers):
        places.setdefault(sequence[number].call, []).append(place)
    own = {kind: [] for kind in places}
    ordinals = {}
    for number in range(numbers[-1] + 1 if numbers else 0):
        kind = sequence[number].call
        if kind in own:
            ordinals[number] = len(own[kind])
            own[kind].append(number)
    last = {kind: ordinals[numbers[at[-1]]] for kind, at in places.items()}

    def before(place, ago):
        """Calls that the call of a step waited for, so many steps ago."""
        kind = sequence[numbers[place]].call
        number = own[kind][ordinals[numbers[place]] - ago * len(places[kind])]
        for source in sequence[number].after:
            if (at := places.get(sequence[source].call)) is None:
                continue
            behind = last[sequence[source].call] - ago * len(at) - ordinals[source]
            back, rest = divmod(behind, len(at))
            if 0 <= back < RECENT and (back or at[-1 - rest] < place):
                yield at[-1 - rest], back

    answer = []
    for place, number in enumerate(numbers):
        steps = 1 + ordinals[number] // len(places[sequence[number].call])
        recent = [frozenset(before(place, ago)) for ago in range(min(RECENT, steps))]
        answer.append(collections.Counter(recent).most_common(1)[0][0])
    return answer
