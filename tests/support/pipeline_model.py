"""The pipeline of a GEMM kernel as a state machine, explored breadth first over all orders in which a GPU may run it.

Processes are, in each block of a cluster, the thread that loads and the warpgroups that multiply; on Ada the warps.
What each of them does is noted from the kernel's own source (``traces.py``). The copy engine writes to its target from
the moment when it is asked to until somebody waits for the bytes, and products read from when they are issued until
their warpgroup waits for them: the longest that either may take.

An mbarrier is PTX's: a phase is complete when no arrivals and no bytes of it are missing; then the next one begins, and
a wait with a parity passes while the current phase has the other one.

Others come in between only before an act that waits, and after one that lets them go on. They notice nothing of what
lies in between: a load that might come there might also have come before, and is then found by what is read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from traces import Note, Program

NEVER = 1 << 30


class ProtocolError(Exception):
    """A rule that a protocol breaks, and one of the shortest orders of events in which it does."""


class Barrier(NamedTuple):
    """The number of complete phases, arrivals and bytes missing in this one, and the arrivals that a phase has."""

    phase: int
    missing: int
    bytes: int
    arrivals: int


class State(NamedTuple):
    """Each process's next act, all barriers (None before their initialisation), and the loads that arrived, as bits."""

    at: tuple[int, ...]
    barriers: tuple[Barrier | None, ...]
    arrived: int


class Act(NamedTuple):
    """A note, with what follows from those before it.

    Attributes:
        kind: see ``trace_shim/trace.h``.
        number: arrivals, bytes or a parity.
        barrier: its index.
        load: the bit of a load, or the bits of those that a wait for copies waits for.
        places: in shared memory, that are loaded or read; for the latter, the number of the load that must be there.
        phase: how many phases a wait is for.
    """

    kind: str
    number: int
    barrier: int
    load: int
    places: list[tuple[int, int]]
    phase: int


class Process:
    """Attributes, each but the first three by the number of the next act:
    name: for messages.
    block: of the cluster.
    acts: in order.
    asked: all loads that it has asked for, as bits.
    reading: the places that its products may be reading.
    came: how many barriers of all threads it has reached.
    awaited: for each barrier, the phase that its next wait is for.
    stop: the next act before which others may come.
    """

    def __init__(self, name: str, block: int) -> None:
        self.name, self.block, self.acts = name, block, list[Act]()
        self.asked, self.reading = [0], [frozenset[int]()]

    def finish(self) -> None:
        """Everything that follows from the acts."""
        acts = self.acts
        self.came = list(itertools.accumulate(act.kind == "S" for act in acts))
        self.came.append(self.came[-1])
        self.awaited = {act.barrier: [NEVER] * (len(acts) + 1) for act in acts if act.kind == "W"}
        self.stop, last = [len(acts)] * len(acts), len(acts)
        for at in reversed(range(len(acts))):
            act = acts[at]
            for barrier, phases in self.awaited.items():
                phases[at] = act.phase if act.kind == "W" and act.barrier == barrier else phases[at + 1]
            self.stop[at] = last
            if act.kind in "WS" or (at and acts[at - 1].kind == "A" != act.kind):
                last = at


class Model:
    """A cluster.

    Args:
        programs: what its processes do.
        asynchronous: whether products still read after they were issued.
    """

    def __init__(self, programs: Sequence[Program], asynchronous: bool = True) -> None:
        notes = [note for program in programs for note in program.notes]
        # what is loaded at once, is there at once
        self._places = sorted({(note.block, note.place, note.number) for note in notes if note.kind == "L"})
        self._barriers = sorted({(note.block, note.barrier) for note in notes if note.barrier >= 0})
        self._asynchronous = asynchronous
        # as bits, the loads to each place; those that each barrier counts; the bytes of each
        self._to, self._counted = [0] * len(self._places), [list[int]() for _ in self._barriers]
        self._bytes: dict[int, int] = {}
        self.processes = [self._process(program) for program in programs]
        self._waiting = [[proc for proc in self.processes if at in proc.awaited] for at in range(len(self._barriers))]
        # processes that do the same may change places
        alike: dict[str, list[int]] = {}
        for who, process in enumerate(self.processes):
            alike.setdefault(repr((process.block, process.acts)), []).append(who)
        self._alike = [group for group in alike.values() if len(group) > 1]

    def _read(self, note: Note) -> list[int]:
        """The places that a note reads."""
        indices, missing = [], note.number
        for index, (block, start, size) in enumerate(self._places):
            common = min(start + size, note.place + note.number) - max(start, note.place)
            if block == note.block and common > 0:
                indices.append(index)
                missing -= common
        if missing:
            raise ProtocolError(f"{note} reads {missing} bytes that nobody loads")
        return indices

    def _process(self, program: Program) -> Process:
        process, turn, unfenced = Process(program.name, program.block), 0, False
        # groups of products and of copies; the last is not committed yet
        products, copies = [set[int]()], [0]
        # for each place, the turn in which it was last read and how often that was; for each barrier, the next phase
        times, phases = dict[int, tuple[int, int]](), dict[int, int]()
        for note in program.notes:
            kind, load, places, phase = note.kind, 0, list[int](), 0
            barrier = self._barriers.index((note.block, note.barrier)) if note.barrier >= 0 else -1
            if kind == "L":
                load = 1 << len(self._bytes)
                places = [self._places.index((note.block, note.place, note.number))]
                self._bytes[load] = note.number
                self._to[places[0]] |= load
                copies[-1] |= load
                if barrier >= 0:
                    self._counted[barrier].append(load)
            elif kind == "R":
                places = self._read(note)
                for place in places:
                    last, before = times.get(place, (-1, 0))
                    times[place] = turn, before + (last != turn)
                if self._asynchronous:
                    products[-1].update(places)
            elif kind == "C":
                products.append(set())
            elif kind == "D":
                products = products[-1 - note.number :]
            elif kind == "K":
                copies.append(0)
            elif kind == "P":
                done = max(len(copies) - 1 - note.number, 0)
                load, copies = sum(copies[:done]), copies[done:]
            elif kind == "W":
                # a first wait for parity 1 is for the phase before the first one
                phase = phases.get(barrier, 1 - note.number)
                phases[barrier] = phase + 1
            if kind == "S" and unfenced:
                raise ProtocolError(f"{program.name} shows barriers to others without a fence")
            unfenced = kind == "I" or (unfenced and kind != "F")
            turn += kind in "WS"
            numbered = [(place, times.get(place, (0, 0))[1]) for place in places]
            process.acts.append(Act(kind, note.number, barrier, load, numbered, phase))
            process.asked.append(process.asked[-1] | (load if kind == "L" else 0))
            process.reading.append(frozenset().union(*products))
        process.finish()
        return process

    # --- what may happen ----------------------------------------------------------------------------------------------

    def explore(self) -> int:
        """The number of states. ProtocolError if a rule is."""
        start = State((0,) * len(self.processes), (None,) * len(self._barriers), 0)
        came: dict[State, tuple[State, int] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            who, moved = -1, False
            try:
                for who in range(len(self.processes)):
                    for after in self._next(state, who):
                        moved = True
                        if after not in came:
                            came[after] = state, who
                            queue.append(after)
                if not moved:
                    who = -1
                    self._check_end(state)
            except ProtocolError as error:
                raise ProtocolError(f"{error}\n{self._story(came, state, who)}") from None
        return len(came)

    def _next(self, state: State, who: int) -> Iterator[State]:
        process, at = self.processes[who], state.at[who]
        if at == len(process.acts):
            return
        act = process.acts[at]
        if act.kind == "W":
            for ready in self._until(state, act, process):
                yield self._run(ready, who)
        elif act.kind != "S" or all(
            other.came[its] >= process.came[at] for other, its in zip(self.processes, state.at)
        ):
            yield self._run(state, who)

    def _until(self, state: State, act: Act, process: Process) -> Iterator[State]:
        """States in which a wait passes: this one, or those after the loads that complete the phase have arrived."""
        barrier = self._initialised(state.barriers, act.barrier, process)
        if barrier.phase % 2 != act.number:
            if barrier.phase != act.phase:
                its = f"phase {act.phase} of {self._name(act.barrier)}"
                raise ProtocolError(f"{process.name} waits for {its}, and passes in phase {barrier.phase}")
            yield state
            return
        requests = self._asked(state.at) & ~state.arrived
        on_their_way = [load for load in self._counted[act.barrier] if load & requests]
        for count in range(1, 1 + len(on_their_way) * (not barrier.missing)):
            for loads in itertools.combinations(on_their_way, count):
                if sum(self._bytes[load] for load in loads) == barrier.bytes:
                    barriers = list(state.barriers)
                    self._complete(barriers, act.barrier, state.at)
                    after = State(state.at, tuple(barriers), state.arrived | sum(loads))
                    yield from self._until(after, act, process)

    def _run(self, state: State, who: int) -> State:
        """The state after a process's acts up to the next one before which others may come."""
        process, (before, barriers_before, arrived) = self.processes[who], state
        at, end, barriers = list(before), process.stop[before[who]], list(barriers_before)
        requests = self._asked(before)
        for act in process.acts[before[who] : end]:
            kind, index = act.kind, act.barrier
            if kind == "I":
                barriers[index] = Barrier(0, act.number, 0, act.number)
            elif kind in "EA":
                self._check_there(self._barriers[index][0], before, process)
                phase, missing, outstanding, arrivals = self._initialised(barriers, index, process)
                if missing == 0:
                    raise ProtocolError(f"{process.name} arrives at {self._name(index)}, where no arrival is missing")
                barriers[index] = Barrier(phase, missing - 1, outstanding + act.number, arrivals)
                if missing == 1 and outstanding + act.number == 0:
                    self._complete(barriers, index, before)
            elif kind == "L":
                ((place, _),) = act.places
                self._check_there(self._places[place][0], before, process)
                self._check_free(place, before, requests & ~arrived, process)
                requests |= act.load
            elif kind == "R":
                for place, number in act.places:
                    loads = requests & self._to[place]
                    if loads & ~arrived or loads.bit_count() != number:
                        those = f"{loads.bit_count()} loads, of which {(loads & arrived).bit_count()} have arrived"
                        raise ProtocolError(
                            f"{process.name} reads load {number} of {self._place(place)}, after {those}"
                        )
            elif kind == "P":
                arrived |= act.load
        at[who] = end
        for group in self._alike:
            if who in group:
                for member, its in zip(group, sorted(at[member] for member in group)):
                    at[member] = its
        return State(tuple(at), tuple(barriers), arrived)

    def _complete(self, barriers: list[Barrier | None], index: int, at: Sequence[int]) -> None:
        phase, arrivals = barriers[index][0], barriers[index][3]  # type: ignore[index]
        barriers[index] = Barrier(phase + 1, arrivals, 0, arrivals)
        for process in self._waiting[index]:
            awaited = process.awaited[index][at[self.processes.index(process)]]
            if awaited <= phase:
                its = f"{process.name} has seen phase {awaited}"
                raise ProtocolError(f"phase {phase + 1} of {self._name(index)} completes before {its}")

    # --- rules --------------------------------------------------------------------------------------------------------

    def _asked(self, at: Sequence[int]) -> int:
        """All loads that have been asked for, as bits."""
        requests = 0
        for process, its in zip(self.processes, at):
            requests |= process.asked[its]
        return requests

    def _check_there(self, block: int, at: Sequence[int], process: Process) -> None:
        ends = [its == len(proc.acts) for proc, its in zip(self.processes, at) if proc.block == block]
        if block != process.block and all(ends):
            raise ProtocolError(f"{process.name} needs the shared memory of block {block}, which has ended")

    def _check_free(self, place: int, at: Sequence[int], on_their_way: int, process: Process) -> None:
        if on_their_way & self._to[place]:
            raise ProtocolError(f"{process.name} loads {self._place(place)} before the former load has arrived")
        for other, its in zip(self.processes, at):
            if place in other.reading[its]:
                raise ProtocolError(f"{process.name} loads {self._place(place)}, which {other.name} still multiplies")

    def _initialised(self, barriers: Sequence[Barrier | None], index: int, process: Process) -> Barrier:
        barrier = barriers[index]
        if barrier is None:
            raise ProtocolError(f"{process.name} uses {self._name(index)} before its initialisation")
        return barrier

    def _check_end(self, state: State) -> None:
        waiting = [
            f"{process.name} waits for {self._name(act.barrier)}, phase {act.phase}"
            if act.kind == "W"
            else process.name
            for process, its in zip(self.processes, state.at)
            for act in process.acts[its : its + 1]
        ]
        if waiting:
            raise ProtocolError("deadlock: " + "; ".join(waiting))
        for index, barrier in enumerate(state.barriers):
            if barrier is None or barrier.missing != barrier.arrivals or barrier.bytes:
                raise ProtocolError(f"{self._name(index)} is left with {barrier}")
            for process in self._waiting[index]:
                # the first wait for an empty stage is for no phase, the phase after its last load is for no wait
                waits = sum(act.kind == "W" and act.barrier == index for act in process.acts)
                if barrier.phase != waits:
                    raise ProtocolError(f"{self._name(index)} is left in phase {barrier.phase}, after {waits} loads")
        if self._asked(state.at) & ~state.arrived:
            raise ProtocolError("loads are left on their way")

    def _name(self, barrier: int) -> str:
        return "the barrier at {1} of block {0}".format(*self._barriers[barrier])

    def _place(self, place: int) -> str:
        return "the {2} bytes at {1} of block {0}".format(*self._places[place])

    def _story(self, came: dict[State, tuple[State, int] | None], state: State, who: int) -> str:
        """Who came when, with the kinds of their acts."""
        steps = [(state, who)] if who >= 0 else []
        while (before := came[state]) is not None:
            steps.append(before)
            state = before[0]
        lines = []
        for its, index in reversed(steps):
            process, at = self.processes[index], its.at[index]
            lines.append(f"  {process.name}: " + "".join(act.kind for act in process.acts[at : process.stop[at]]))
        return "\n".join(lines)
