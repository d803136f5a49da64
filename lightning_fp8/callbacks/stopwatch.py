"""Forward and backward times of layers, without adding nodes to the autograd graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

# for a layer that did not run: less than any time, so the maximum over processes is a time if any of them ran it
NOTHING_RAN = -1.0


class Clock(Protocol):
    """Sets marks, and measures the time between two of them after :meth:`wait`."""

    def mark(self) -> Any:
        """Mark this point in the order of the work."""

    def wait(self) -> None:
        """Wait until all marks have been reached."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to another."""


class HostClock:
    """For devices whose work is done when a call returns. Marks are nanoseconds."""

    def mark(self) -> int:
        """The host's time."""
        return time.perf_counter_ns()

    def wait(self) -> None:
        """There is nothing to wait for."""

    def milliseconds(self, start: int, end: int) -> float:
        """Milliseconds from one mark to another."""
        return (end - start) / 1e6


class CudaClock:
    """Marks are events on the current stream; setting one does not synchronise."""

    def mark(self) -> torch.cuda.Event:
        """An event after the work that is queued on the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for all streams: a layer may run on its own stream."""
        torch.cuda.synchronize()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds from one mark to another."""
        return start.elapsed_time(end)


def clock_for(device: torch.device) -> Clock:
    """The clock for the work of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class _Span:
    """A stretch of forward or backward, from one mark to another."""

    def __init__(self) -> None:
        self.start: Any = None
        self.end: Any = None


class Stopwatch:
    """Watches all calls of some layers until :meth:`remove_hooks`.

    A layer's backward time is the sum over the nodes that its calls added to the graph. So it excludes other layers,
    whatever the engine runs in between, and is complete where several layers share an input.

    Args:
        layers: by path.
        clock: sets the marks.
    """

    def __init__(self, layers: dict[str, nn.Module], clock: Clock) -> None:
        self._clock = clock
        self._spans: list[tuple[list[_Span], list[_Span]]] = []
        self._running: list[_Span] = []
        self._claims = 0
        self._hooks: list[RemovableHandle] = []
        for layer in layers.values():
            forwards: list[_Span] = []
            backwards: list[_Span] = []
            self._spans.append((forwards, backwards))
            enter, leave = self._hooks_for(forwards, backwards)
            # innermost, so that the work of other hooks does not count as the layer's
            self._hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            # always: recomputation may end a forward with an exception, as soon as it has what it needs
            self._hooks.append(layer.register_forward_hook(leave, prepend=True, always_call=True))

    def remove_hooks(self) -> None:
        """Remove the hooks from layers and nodes."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def milliseconds(self) -> list[list[float]]:
        """Forward and backward of each layer, in the order given; ``NOTHING_RAN`` for one that did not run."""
        self._clock.wait()
        return [[self._sum(spans) for spans in both] for both in self._spans]

    def _sum(self, spans: Sequence[_Span]) -> float:
        if not spans:
            return NOTHING_RAN
        return sum(self._clock.milliseconds(span.start, span.end) for span in spans)

    def _hooks_for(
        self, forwards: list[_Span], backwards: list[_Span]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        calls: list[tuple[_Span, set[Node], int]] = []

        def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # a graph that is compiled in this step would keep the hook permanently
            if torch.compiler.is_compiling():
                return
            span = _Span()
            # read now, because the layer may change an input in place
            calls.append((span, set(_grad_fns((args, kwargs))), self._claims))
            span.start = self._clock.mark()

        def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # another hook may have failed before `enter`
            if torch.compiler.is_compiling() or not calls:
                return
            end = self._clock.mark()
            span, inputs, claims_before = calls.pop()
            span.end = end
            forwards.append(span)
            for node in self._claim(output, inputs, claims_before):
                self._watch(node, backwards)
            self._restart_running()

        return enter, leave

    def _claim(self, output: Any, inputs: set[Node], claims_before: int) -> Iterator[Node]:
        """The nodes from a call's output back to its inputs, except those that an earlier call has claimed.

        Calls share nodes where autocast casts a weight once for all of them: they belong to the first. Nodes that a
        call inside this one has claimed belong to both.
        """
        seen, waiting = set(inputs), list(_grad_fns(output))
        while waiting:
            node = waiting.pop()
            if node in seen or node.name().endswith("AccumulateGrad"):
                continue
            seen.add(node)
            # stored on the node: a list of nodes here would keep the graph alive
            claims = cast(dict[Any, int], node.metadata)
            if claims.setdefault(self, self._claims) < claims_before:
                continue
            self._claims += 1
            yield node
            waiting.extend(earlier for earlier, _ in node.next_functions if earlier is not None)

    def _watch(self, node: Node, spans: list[_Span]) -> None:
        started: list[_Span] = []

        def before(grad_outputs: Sequence[Tensor]) -> None:
            span = _Span()
            started.append(span)
            self._running.append(span)
            span.start = self._clock.mark()

        def after(grad_inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
            end = self._clock.mark()
            span = started.pop()
            span.end = end
            self._running.remove(span)
            spans.append(span)

        self._hooks.extend((node.register_prehook(before), node.register_hook(after)))

    def _restart_running(self) -> None:
        """Exclude a forward that has just ended from the time of the running nodes: it recomputes what they need."""
        for span in self._running:
            span.start = self._clock.mark()


def _grad_fns(values: Any) -> Iterator[Node]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield value.grad_fn
