"""What operators cost on a device: a roofline with the shares of its peaks that programs reach.

An implementation of FP8 is described by what it moves and launches besides the products. Published results of other
implementations (``benchmarks/published.jsonl``) are thus estimated with their costs, and this package with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil

from lightning_fp8.estimation.counting import Attention, Elementwise, MatrixProduct, Operator, Step
from lightning_fp8.estimation.devices import Gpu
from lightning_fp8.ops.formats import Product


@dataclass(frozen=True)
class Constants:
    """What is not in a data sheet. ``python -m benchmarks.published`` fits them, see ``docs/estimate.md``.

    Attributes:
        bf16, fp8: the share of the peak that large products reach.
        attention: the share of the bf16 peak that attention reaches.
        bandwidth: the share of the memory bandwidth that programs reach.
        fused: the share of the bytes of element-wise operators that remains if a compiler fuses them.
        operator: host time to launch an operator in eager mode, in seconds.
        kernel: the minimum time of a kernel on the device, in seconds.
        ramp: the time to start and end a product, as a number of elements along K.
        compiled: the share of an operator's host time that remains if a compiler launches it.
        overlap: the share of the communication that overlaps with computation.
    """

    bf16: float = 0.70
    fp8: float = 0.62
    attention: float = 0.47
    bandwidth: float = 0.84
    fused: float = 0.35
    operator: float = 6.4e-6
    kernel: float = 2.7e-6
    ramp: float = 286.0
    compiled: float = 0.15
    overlap: float = 0.72


@dataclass(frozen=True)
class Implementation:
    """What an implementation of FP8 does besides the products.

    Attributes:
        activation: bytes moved to cast an element of an input or an output's gradient, for both of its products.
        weight: bytes moved to cast an element of a weight.
        host: additional host time of a layer over bf16, for forward and backward in eager mode, in operators.
        kernels: additional kernels of a layer over bf16, for forward and backward.
        speed: the speed of its products, relative to one scale for each operand.
    """

    activation: float
    weight: float
    host: float
    kernels: float
    speed: float = 1.0


# A cast for both products reads 2 bytes and writes 1 in each layout. One from its own values reads it twice.
OURS = {
    "fp8-delayed": Implementation(4, 6, 12, 3),
    "fp8-current": Implementation(6, 6, 14, 5),
    "fp8-block": Implementation(4.1, 6, 12, 3, speed=0.83),
    "fp8-mx": Implementation(4.1, 6, 12, 3),
}


@dataclass(frozen=True)
class Seconds:
    """The time of a training step, by purpose. All are seconds on the device, except ``host``."""

    products: float = 0.0
    attention: float = 0.0
    casts: float = 0.0
    other: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        """The sum of all but ``host``."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host

    @property
    def total(self) -> float:
        """The step's time: the host launches ahead of the device, so the slower one decides."""
        return max(self.device, self.host)


@dataclass(frozen=True)
class Pricing:
    """Prices the operators of a step on a device.

    Attributes:
        gpu: the device.
        compiled: whether a compiler fuses and launches the operators.
        gpus: the number of devices that exchange parameters or gradients; 1 for no exchange.
        sharded: whether parameters are sharded (FSDP), or only gradients are summed (DDP).
        constants: see :class:`Constants`.
    """

    gpu: Gpu
    compiled: bool = False
    gpus: int = 1
    sharded: bool = False
    constants: Constants = Constants()

    def step(
        self,
        step: Step,
        in_fp8: Mapping[str, frozenset[Product]] = {},
        implementation: Implementation | None = None,
        gathers_fp8: bool = False,
    ) -> Seconds:
        """The time of a step.

        Args:
            step: the step's operators.
            in_fp8: for each weight, by name, its products that run in FP8.
            implementation: the implementation of FP8; None for bf16.
            gathers_fp8: whether FSDP gathers these weights in FP8.
        """
        sums = dict.fromkeys(("products", "attention", "other"), 0.0)
        operators = 0.0
        for operator, times in step.operators.items():
            fp8 = isinstance(operator, MatrixProduct) and operator.product in in_fp8.get(operator.weight or "", ())
            if isinstance(operator, Elementwise) and operator.copies_for in in_fp8:
                continue  # the cast reads the original
            kind = {MatrixProduct: "products", Attention: "attention"}.get(type(operator), "other")
            sums[kind] += times * self.operator(operator, implementation if fp8 else None)
            operators += times
        casts, kernels, host = self._casts(step, in_fp8, implementation)
        per_operator = self.constants.operator * (self.constants.compiled if self.compiled else 1)
        return Seconds(
            **sums,
            casts=casts,
            optimizer=self._moves(7 * step.trained_bytes / (self.gpus if self.sharded else 1)),
            communication=self._communication(step, in_fp8 if gathers_fp8 else {}),
            host=per_operator * (operators + (kernels if self.compiled else host)),
        )

    def operator(self, operator: Operator, implementation: Implementation | None = None) -> float:
        """Seconds of one operator on the device, in FP8 if an implementation is given."""
        reached = self.constants
        if isinstance(operator, Elementwise):
            moved = self._moves(operator.bytes) * (reached.fused if self.compiled else 1)
            least = reached.kernel * (reached.fused if self.compiled else 1)
            return max(moved, least, operator.flops / (self.gpu.bf16 * 1e12 * reached.bf16))
        if isinstance(operator, Attention):
            return max(operator.flops / (self.gpu.bf16 * 1e12 * reached.attention), reached.kernel)
        m, n, k, batch = operator.m, operator.n, operator.k, operator.batch
        if implementation is None or self.gpu.fp8 is None:
            speed, size = self.gpu.bf16 * reached.bf16, 2
        else:
            speed, size = self.gpu.fp8 * reached.fp8 * implementation.speed, 1
        computes = operator.flops / (speed * 1e12 * self._filled(m, n, k, batch))
        moves = self._moves(batch * (size * (m * k + k * n) + 2 * m * n))
        return max(computes, moves) + reached.kernel

    def _filled(self, m: int, n: int, k: int, batch: int) -> float:
        """The useful share of the device's work: ragged tiles and ragged waves cost as much as full ones."""
        shares = []
        for rows, columns, speed in ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7)):
            tiles = batch * ceil(m / rows) * ceil(n / columns)
            waves = ceil(tiles / self.gpu.multiprocessors)
            # if there are few tiles, a library splits the sum over K among the idle multiprocessors
            parts = max(1, min(self.gpu.multiprocessors // tiles, k // 1024)) if waves == 1 else 1
            done = batch * m * n * parts / (waves * self.gpu.multiprocessors * rows * columns)
            shares.append(speed * done * k / (k + self.constants.ramp * parts))
        return max(shares)

    def _casts(
        self, step: Step, in_fp8: Mapping[str, frozenset[Product]], implementation: Implementation | None
    ) -> tuple[float, float, float]:
        """Seconds of all casts, kernels that they launch, and the host's time for them in operators."""
        if implementation is None:
            return 0.0, 0.0, 0.0
        moved = 0.0
        for tensor in step.inputs:
            if any(name in in_fp8 for name in tensor.weights):
                moved += implementation.activation * tensor.elements
        layers = 0
        weights = {}
        for operator, times in step.operators.items():
            if isinstance(operator, MatrixProduct) and operator.weight in in_fp8:
                if operator.product == "wgrad":
                    # M is the layer's outputs, K the rows of the gradient
                    moved += implementation.activation * times * operator.batch * operator.m * operator.k
                if operator.product == "fprop":
                    layers += times
                    weights[operator.weight] = operator.batch * operator.n * operator.k
        moved += implementation.weight * sum(weights.values())
        kernels = implementation.kernels * layers
        return self._moves(moved) + self.constants.kernel * kernels, kernels, implementation.host * layers

    def _communication(self, step: Step, gathered_in_fp8: Mapping[str, frozenset[Product]]) -> float:
        """Seconds of communication not hidden by computation: fp32 gradients, and with FSDP also bf16 parameters."""
        if self.gpus == 1:
            return 0.0
        in_fp8 = sum(step.sizes[name] for name in gathered_in_fp8)
        gathers = 2 * (2 * (step.parameters - in_fp8) + in_fp8) if self.sharded else 0
        sent = gathers + step.trained * 4 * (1 if self.sharded else 2)
        seconds = sent * (self.gpus - 1) / self.gpus / (self.gpu.link * 1e9 * self.constants.bandwidth)
        return seconds * (1 - self.constants.overlap)

    def _moves(self, number: float) -> float:
        """Seconds that the memory takes to move this many bytes."""
        return number / (self.gpu.bandwidth * 1e9 * self.constants.bandwidth)
