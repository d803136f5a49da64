"""Our model of the tensor cores, and our kernels on it, give the bits of `mmaemu`, which replays recorded hardware.

mmaemu (Apache-2.0) equals FP8 products recorded on an H100 PCIe and on an RTX 4060. It does not know sm_120.
"""

from __future__ import annotations

import mmaemu
import pytest
import torch
from gemm_on_host import Chosen, run
from host_kernels import host_tensor_map
from tensor_cores import ADA, HOPPER, TensorCores
from torch import Tensor

from kernels_cuda import gemm, gemm_variants

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PAIRS = [(a, b) for a in DTYPES for b in DTYPES]
MODELS = {"hopper": HOPPER, "ada": ADA}
pytestmark = pytest.mark.filterwarnings("ignore::mmaemu.UnvalidatedEnvelopeWarning")


def codes(rows: int, k: int, fmt: str, kind: str, generator: torch.Generator) -> Tensor:
    """Codes of finite values, ``[rows, k] uint8``."""
    made = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=generator)
    if kind == "subnormal":
        made &= 0x87 if fmt == "e4m3" else 0x83
    elif kind == "sparse":
        made = torch.where(torch.rand(rows, k, generator=generator) < 0.85, 0, made)
    elif kind == "cancelling":
        half = k // 2
        made[:, half : 2 * half] = made[:, :half] ^ (0x80 if rows % 2 else 0)
    return torch.where(made.view(DTYPES[fmt]).float().isfinite(), made, 0)


def recorded(a: Tensor, b: Tensor, formats: tuple[str, str], profile: str, promote: bool) -> Tensor:
    of_a, of_b = (operand.view(DTYPES[fmt]) for operand, fmt in zip((a, b), formats))
    return mmaemu.accumulate(of_a, of_b, use_fast_accum=not promote, profile=profile, splitk=1, backend="reference")


def modelled(a: Tensor, b: Tensor, formats: tuple[str, str], model: TensorCores, promote: bool) -> Tensor:
    of_a, of_b = (operand.view(DTYPES[fmt]).double() for operand, fmt in zip((a, b), formats))
    return model.sums(of_a, of_b, formats, promote).float()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert ((actual == expected) | (actual.isnan() & expected.isnan())).all()


@pytest.mark.parametrize("profile", MODELS)
@pytest.mark.parametrize("formats", PAIRS)
def test_the_model_gives_recorded_sums(profile: str, formats: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(1)
    for k, (m, n) in {32: (17, 16), 96: (17, 16), 144: (9, 8), 400: (9, 8), 1024: (5, 4), 8192: (3, 2)}.items():
        for kind in ("any", "subnormal", "sparse", "cancelling") if k < 1024 else ("any", "cancelling"):
            a, b = (codes(rows, k, fmt, kind, generator) for rows, fmt in zip((m, n), formats))
            for promote in (False, True):
                expected = recorded(a, b, formats, profile, promote)
                assert_same(modelled(a, b, formats, MODELS[profile], promote), expected)


@pytest.mark.parametrize(("family", "formats"), [("gemm_sm90", pair) for pair in PAIRS[:3]] + [("gemm_sm89", PAIRS[0])])
def test_our_kernels_give_recorded_sums(family: str, formats: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and inf among the operands too. Ada's with scales of 1 for blocks."""
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)
    generator = torch.Generator().manual_seed(2)
    m, n, k = 40, 24, 400
    a, b = (codes(rows, k, fmt, "any", generator) for rows, fmt in zip((m, n), formats))
    a[3, 5], b[2, 7] = 0x7F, 0x7C
    if family == "gemm_sm90":
        configuration = gemm_variants.configurations((9, 0))[-1]
        chosen, scales = Chosen(configuration, torch.float32, formats, True), [torch.ones(())] * 2
    else:
        (configuration,) = gemm_variants.configurations((8, 9), in_blocks=True)
        chosen = Chosen(configuration, torch.float32, formats, True, 1)
        scales = [torch.ones(-(-k // 128), rows).t() for rows in (m, n)]
    out = run(((a, scales[0]), (b, scales[1])), chosen)
    profile = "hopper" if family == "gemm_sm90" else "ada"
    assert_same(out, recorded(a, b, formats, profile, True))
