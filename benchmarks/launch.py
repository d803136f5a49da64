"""The suite ``launch``: host time of one launch of a small kernel, compared with the driver alone."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.case import EXACT, Case, Results, difference
from benchmarks.whole_model import steady_state
from kernels_cuda import scales
from kernels_cuda.launch import Kernel, _Packed, _packed
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

_NUMPY_TYPES = {"P": "u8", "i": "i4", "f": "f4"}
_NAMES = ("amax", "amax_history", "scale", "fp8_max", "nonfinite_steps")
Tensors = tuple[torch.Tensor, ...]
Arguments = tuple[int | float, ...]
Launch = Callable[[int], None]


def cases(device: torch.device) -> list[Case]:
    """The only case."""
    return [UpdateArguments()]


class UpdateArguments:
    """Launches one block of ``update_scales`` over three tensors: five pointers, four integers, a float."""

    name = "update_scales arguments"
    bytes = None
    flops = None

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel to launch, or no device to launch it on."""
        return device.type != "cuda" or kernels.update_kernel(device) is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``Kernel``, CuPy's ``RawKernel`` and ``driver``; on the CPU ``Kernel`` without a driver."""
        timed, checked = _tensors(device), _tensors(device)
        if device.type != "cuda":
            kernel = WithoutDriver(None, scales.LAYOUT, scales.THREADS, 0)
            given = _arguments(timed)
            return [Variant("Kernel(no driver)", lambda at: kernel(1, *given), lambda: kernel.difference(given))]
        found = kernels.update_kernel(device)
        if found is None:
            raise RuntimeError(f"There is no kernel on {device}.")
        launches, launches_to_check = _launches(found, timed), _launches(found, checked)

        def variant(name: str) -> Variant:
            return Variant(name, launches[name], lambda: _difference(launches_to_check[name], checked))

        return [variant(name) for name in launches]


def _tensors(device: torch.device) -> Tensors:
    state = steady_state(1, device, length=16)
    state.amax.copy_(torch.tensor([3.0, 5.0, 7.0]))
    return state.amax, state.amax_history, state.scale, state.fp8_max, state.nonfinite_steps


def _arguments(tensors: Tensors) -> Arguments:
    """As :func:`kernels_cuda.scales.update_scales` gives them."""
    length, delayed = tensors[1].shape
    return (*(tensor.data_ptr() for tensor in tensors), len(tensors[0]), delayed, length, 0, 1.0)


def _launches(kernel: Kernel, tensors: Tensors) -> dict[str, Launch]:
    """Launches on these tensors, by variant; the caller must keep the tensors alive."""
    arguments = _arguments(tensors)
    return {
        "Kernel": lambda at: kernel(1, *arguments),
        "RawKernel": _cupy_launch(kernel, arguments),
        "driver": _driver_launch(kernel, arguments),
    }


def _cupy_launch(kernel: Kernel, arguments: Arguments) -> Launch:
    """CuPy's own launch, with the struct as a NumPy scalar, on torch's current stream."""
    cupy, numpy = import_module("cupy"), import_module("numpy")
    fields = [(f"field{number}", _NUMPY_TYPES[letter]) for number, letter in enumerate(scales.LAYOUT)]
    packed = numpy.zeros((), numpy.dtype(fields, align=True))
    function = kernel._function

    def launch(at: int) -> None:
        packed[()] = arguments
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            function((1,), (scales.THREADS,), (packed,))

    return launch


def _driver_launch(kernel: Kernel, arguments: Arguments) -> Launch:
    """The driver's launch alone, through the same binding, with all arguments packed in advance."""
    packed = _Packed()
    buffer, offset, pointers = packed.place
    struct.pack_into(scales.LAYOUT, buffer, offset, *arguments)
    stream = torch.cuda.current_stream().cuda_stream
    given = (kernel._pointer, 1, 1, 1, scales.THREADS, 1, 1, 0, stream, pointers, 0)
    launch_kernel = kernel._launch_kernel

    # keep `packed` alive: `given` only has its address
    def launch(at: int, kept: _Packed = packed) -> None:
        launch_kernel(*given)

    return launch


def _difference(launch: Launch, tensors: Tensors) -> str | None:
    """The difference between a launch on these tensors and torch's own operators on a copy; None if they agree."""
    tensors[0].copy_(torch.tensor([3.0, 5.0, 7.0]))
    expected = tuple(tensor.clone() for tensor in tensors)
    baselines.update_scales(*expected)
    launch(0)
    timing.synchronize()
    return difference(_named(tensors), _named(expected), EXACT)


def _named(tensors: Tensors) -> Results:
    return dict(zip(_NAMES, ([tensor] for tensor in tensors)))


class WithoutDriver(Kernel):
    """A ``Kernel`` for machines without a driver: calls of torch and of the driver are replaced by stubs."""

    def _load(self) -> None:
        self._set_context = lambda device: None
        self._launch_kernel: Callable[..., Any] = lambda *_: None
        self._current_device = lambda: 0
        self._current_stream = lambda device: 0
        self._pointer = 0

    def difference(self, arguments: Arguments) -> str | None:
        """What differs between these arguments and those packed for the driver by a call; None if nothing does."""
        self(1, *arguments)
        place = ctypes.cast(_packed.place[2], ctypes.POINTER(ctypes.c_void_p))[0]
        if place is None or self._layout.unpack(ctypes.string_at(place, self._layout.size)) != arguments:
            return "other arguments"
        return None
