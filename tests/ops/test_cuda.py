"""On a GPU: every kernel against the reference, and streams, graphs, threads, and the absence of synchronisation."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from by_columns import padded, unpadded
from fp8_numpy import saturating_cast
from host_kernels import VARIANTS
from slots import slot_of
from sqnr import sqnr
from torch import Tensor, nn

from kernels_cuda import casts
from kernels_cuda.launch import Kernel
from kernels_cuda.load import load
from lightning_fp8 import DelayedScaling, convert, scaling_state
from lightning_fp8.ops.arithmetic import saturated
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.operand import Want

pytestmark = pytest.mark.cuda
GUARD = 64


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Switches off, after a test, the mode in which synchronising with the device is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def cast_kernel(gpu: torch.device, *variant: object) -> Kernel:
    defines = casts.variant(*variant)  # type: ignore[arg-type]
    return load("cast_transpose", defines, casts.layout(defines), casts.THREADS, gpu.index)


def guarded(shape: tuple[int, ...], device: torch.device, poison: int) -> tuple[Tensor, Tensor]:
    """A poisoned uint8 tensor between guards, and its whole memory."""
    size = int(torch.tensor(shape).prod())
    whole = torch.full((size + 2 * GUARD,), poison, dtype=torch.uint8, device=device)
    return whole[GUARD : GUARD + size].view(shape), whole


def patterns(dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(-(2**31), 2**31 - 1, (256, 256), dtype=torch.int32, generator=generator).view(dtype)
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_passes_its_check(gpu: torch.device, variant: tuple[torch.dtype, str, str, bool]) -> None:
    assert kernels._cast_variant(*variant).check(gpu, cast_kernel(gpu, *variant)) is None


def test_the_kernels_for_weights_and_scales_pass_theirs(gpu: torch.device) -> None:
    for variant in (kernels._weights_variant(False), kernels._update_variant()):
        kernel = load(variant.family, variant.defines, variant.layout, variant.block, gpu.index)
        assert variant.check(gpu, kernel) is None


@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**-9, 1e30, 3.4028234663852886e38])
@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", list(casts.INPUTS))
def test_every_bit_pattern(gpu: torch.device, dtype: torch.dtype, format: str, scale: float) -> None:
    x = patterns(dtype)
    state = torch.tensor([scale], device=gpu), torch.ones(1, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu)
    amax, scale_inv = torch.zeros(1, device=gpu), torch.zeros((), device=gpu)
    results = []
    for poison in (0x00, 0xA5):
        (y, y_whole), (y_t, y_t_whole) = guarded((256, 256), gpu, poison), guarded((256, 256), gpu, poison)
        result = casts.Result(*state, amax, scale_inv, y, y_t)
        casts.cast_transpose(cast_kernel(gpu, dtype, format), x.to(gpu), result)
        assert torch.equal(y_t.t(), y)
        for whole in (y_whole, y_t_whole):
            assert (whole[:GUARD] == poison).all()
            assert (whole[-GUARD:] == poison).all()
        results.append(y.cpu())
    assert torch.equal(*results)
    expected = torch.from_numpy(saturating_cast(x.float().numpy(), torch.tensor(scale).numpy(), format))
    number = ~x.isnan() & ~(x.float() * scale).isnan()
    assert torch.equal(results[0][number], expected[number])
    assert (results[0][~number] & 0x7F == 0x7F).all()
    assert amax.isnan().all()


SIZES = (1, 15, 17, 63, 65, 127, 129, 200, 1000)


@pytest.mark.parametrize("rows", SIZES)
def test_ragged_shapes_strides_and_unaligned_addresses(gpu: torch.device, rows: int) -> None:
    kernel = cast_kernel(gpu, torch.bfloat16, "e4m3")
    for columns in SIZES:
        wide = torch.randn(rows + 1, columns + 9, device=gpu).bfloat16()
        for x in (
            wide[:rows, :columns],
            wide[1:, 1 : columns + 1],
            wide.flatten()[1 : 1 + rows * columns].view(rows, -1),
        ):
            (y, y_whole), (y_t, y_t_whole) = (
                guarded(shape, gpu, 0x5A) for shape in ((rows, columns), (columns, padded(rows)))
            )
            sums = torch.full((casts.column_sum_tiles(rows), columns), float("nan"), device=gpu)
            one, zero = torch.ones(1, device=gpu), torch.zeros(1, device=gpu)
            index, scale_inv = torch.zeros(1, dtype=torch.int64, device=gpu), torch.zeros((), device=gpu)
            casts.cast_transpose(kernel, x, casts.Result(one * 2, one, index, zero, scale_inv, y, y_t, sums))
            expected = saturated(x.cpu(), torch.tensor(2.0), FORMATS["e4m3"])
            assert torch.equal(y.cpu(), expected)
            assert torch.equal(unpadded(y_t.cpu(), rows), expected.t())
            assert zero.item() == x.abs().max().item()
            torch.testing.assert_close(sums.sum(0), x.float().sum(0), rtol=1e-5, atol=1e-3)
            assert all(
                (whole[:GUARD] == 0x5A).all() and (whole[-GUARD:] == 0x5A).all() for whole in (y_whole, y_t_whole)
            )


def test_results_are_the_same_every_time(gpu: torch.device) -> None:
    dy = torch.randn(4096, 1024, device=gpu).bfloat16()
    kernel = cast_kernel(gpu, torch.bfloat16, "e5m2")
    runs = []
    for _ in range(5):
        sums = torch.empty(casts.column_sum_tiles(4096), 1024, device=gpu)
        one, index = torch.ones(1, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu)
        empty = torch.empty(0, dtype=torch.uint8, device=gpu)
        result = casts.Result(one, one, index, None, torch.zeros((), device=gpu), empty, empty, sums)
        casts.cast_transpose(kernel, dy, result)
        runs.append(sums.sum(0))
    assert all(torch.equal(run, runs[0]) for run in runs)


def encoder(device: torch.device | str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return convert(model, DelayedScaling(amax_history_len=16)).to(device)


def train(model: nn.Module, steps: int, forward: object = None) -> list[Tensor]:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 64, 256, generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = (forward or model)(x).float().square().mean()  # type: ignore[operator]
        loss.backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def test_training_is_that_of_the_cpu(gpu: torch.device) -> None:
    on_cpu, on_gpu = encoder("cpu"), encoder(gpu)
    torch.testing.assert_close(torch.stack(train(on_gpu, 5)), torch.stack(train(on_cpu, 5)), rtol=1e-2, atol=0)
    theirs, ours = scaling_state(on_cpu), scaling_state(on_gpu)
    assert sqnr(ours.amax_history.cpu(), theirs.amax_history) > 20
    assert kernels.weights_kernel(gpu, False) is not None
    assert kernels.update_kernel(gpu) is not None


@pytest.mark.usefixtures("_no_waiting")
def test_no_step_waits_for_the_device(gpu: torch.device) -> None:
    model = encoder(gpu)
    train(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(4, 64, 256, device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert scaling_state(model).every_tensor_has_history


def test_a_stream_of_its_own_and_another_thread(gpu: torch.device) -> None:
    model = encoder(gpu).eval()
    x = torch.randn(4, 64, 256, device=gpu)
    expected = model(x)
    stream, results = torch.cuda.Stream(gpu), []
    stream.wait_stream(torch.cuda.current_stream(gpu))

    def run() -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            late = x * 1  # queued on the stream just before: a launch on another stream would read it too early
            results.append(model(late))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


def test_the_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = encoder("cuda:1")
    torch.testing.assert_close(
        torch.stack(train(model, 3)), torch.stack(train(encoder("cuda:0"), 3)), rtol=1e-3, atol=0
    )


def test_a_training_step_in_a_cuda_graph(gpu: torch.device) -> None:
    model = encoder(gpu)
    train(model, 3)
    eager = copy.deepcopy(model)
    parameters = list(model.parameters())
    static = torch.zeros(4, 64, 256, device=gpu)

    def step(x: Tensor, model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        scaling_state(model).update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad.zero_()
        return loss

    for parameter in (*parameters, *eager.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    warm_up = torch.cuda.Stream(gpu)
    warm_up.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(warm_up):
        step(static, copy.deepcopy(model))
    torch.cuda.current_stream(gpu).wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, model)
    for _ in range(3):
        x = torch.randn(4, 64, 256, device=gpu)
        static.copy_(x)
        graph.replay()
        torch.testing.assert_close(captured, step(x, eager), rtol=1e-4, atol=0)
    torch.testing.assert_close(scaling_state(model).scale, scaling_state(eager).scale, rtol=1e-2, atol=0)


@pytest.mark.slow
def test_compiled_with_reduced_overhead(gpu: torch.device) -> None:
    eager, model = encoder(gpu), encoder(gpu)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    torch.testing.assert_close(torch.stack(train(model, 6, compiled)), torch.stack(train(eager, 6)), rtol=2e-2, atol=0)


def test_operators_equal_plain_torch(gpu: torch.device) -> None:
    state = ScalingState(["a"], DelayedScaling(), gpu)
    state.amax.fill_(3.0)
    state.update()
    x = torch.randn(333, 250, device=gpu).bfloat16()
    for tensor in (x, x.t(), x[:, 3:], x[::2, ::2]):
        slot, want = slot_of(state), Want(True, True)
        made = slot.rows.by_kernel(tensor, slot, want), slot.rows.by_reference(tensor, slot, want)
        for ours, theirs in zip(made[0][:2], made[1][:2], strict=True):
            assert all(map(torch.equal, ours[:2], theirs[:2]))
