"""Which precisions run on which device, and on which kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kernels_cuda.gemm_variants import configurations, mx_configurations
from lightning_fp8.ops.cuda import gemm_table, kernels
from lightning_fp8.ops.cuda.plain import check_blocks, check_mx
from lightning_fp8.scaling.recipe import RECIPES
from lightning_fp8.tools.doctor.diagnosis import CANNOT, Diagnosis, KernelCheck
from lightning_fp8.tools.doctor.kernel_checks import gemm

# Ampere: the first generation with bf16
_BF16_CAPABILITY = (8, 0)
_BF16 = ("bf16-mixed", "bf16-true")
_TORCH, _OWN, _REFERENCE, _CUBLASLT = "torch's operators", "own kernels", "reference (CPU)", "torch._scaled_mm"


def describe(
    findings: Diagnosis, devices: Sequence[torch.device], unfit: Collection[torch.device], ready: bool, compile: bool
) -> None:
    """Add the table of precisions, from the results for toolchain and kernels."""
    rows = []
    for device in devices:
        capability = torch.cuda.get_device_capability(device)
        runs = "yes" if capability >= _BF16_CAPABILITY else f"no: compute capability {capability[0]}.{capability[1]}"
        rows += [(str(device), precision, runs, "-", "-", "-") for precision in _BF16]
        per_tensor = _fp8(findings, device, unfit, ready, compile)
        by_precision = {
            "fp8-block": _in_blocks(capability, per_tensor, ready),
            "fp8-mx": _in_mx(capability, per_tensor, ready),
        }
        rows += [(str(device), precision, *by_precision.get(precision, per_tensor)) for precision in RECIPES]
    rows += [("cpu", precision, "yes", "-", "-", "-") for precision in _BF16]
    rows += [("cpu", precision, "yes", _REFERENCE, _REFERENCE, _REFERENCE) for precision in RECIPES]
    findings.section("Precisions", ("device", "precision", "runs", "casts", "scales", "GEMMs"), *rows)


def _fp8(
    findings: Diagnosis, device: torch.device, unfit: Collection[torch.device], ready: bool, compile: bool
) -> tuple[str, str, str, str]:
    if device in unfit:
        major, minor = torch.cuda.get_device_capability(device)
        return f"no: compute capability {major}.{minor}", "-", "-", "-"
    try:
        trouble = gemm(device)
    # cuBLAS, the driver or torch may raise anything
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    if trouble is not None:
        findings.problem(
            CANNOT,
            f"torch._scaled_mm, which computes the FP8 products, does not work on {device}: {trouble}",
            'Trainer(precision="bf16-mixed"), or another torch: `pip install --upgrade torch`.',
        )
    casts, scales = _served(findings.kernels, device, ready, compile)
    return "yes" if trouble is None else "no", casts, scales, "FAILED" if trouble else _gemms(device, ready)


def _in_blocks(
    capability: tuple[int, int], per_tensor: tuple[str, str, str, str], ready: bool
) -> tuple[str, str, str, str]:
    """The cells of ``fp8-block``, from those of the precisions with one scale per tensor."""
    runs, _, scales, _ = per_tensor
    if runs != "yes":
        return per_tensor
    own = _own(ready) or _TORCH
    if own != _TORCH and configurations(capability, promote=True):
        return runs, own, scales, own
    try:
        check_blocks(capability, torch.version.cuda)
    except RuntimeError as error:
        return f"no: {error}", "-", "-", "-"
    return runs, own, scales, "torch's scaled_mm (cuBLASLt)"


def _own(ready: bool) -> str | None:
    """Our kernels, which are tested when they are used; None where they are not."""
    return f"{_OWN} (tested at first use)" if ready and _backend() not in (None, "reference") else None


def _in_mx(
    capability: tuple[int, int], per_tensor: tuple[str, str, str, str], ready: bool
) -> tuple[str, str, str, str]:
    """The cells of ``fp8-mx``."""
    runs, _, scales, _ = per_tensor
    if runs != "yes":
        return per_tensor
    try:
        check_mx(capability)
    except RuntimeError as error:
        return f"no: {error}", "-", "-", "-"
    own = _own(ready) if mx_configurations(capability) else None
    return runs, _own(ready) or _TORCH, scales, own or "torch's scaled_mm (cuBLASLt)"


def _served(checks: Sequence[KernelCheck], device: torch.device, ready: bool, compile: bool) -> tuple[str, str]:
    """What runs the casts, and what updates the scales."""
    chosen = _backend()
    if chosen is None:
        return "no such backend", "no such backend"
    if not ready or chosen == "reference":
        return _TORCH, _TORCH
    if not compile:
        return (f"{_OWN} (not tested: --quick)",) * 2
    mine = [check for check in checks if check.place == str(device)]
    casts, updates = ([check for check in mine if check.kernel.startswith(name)] for name in ("cast", "update"))
    return _share(casts), _share(updates)


def _gemms(device: torch.device, ready: bool) -> str:
    """What ``gemm="auto"`` runs, according to the GPU's tables."""
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if not ready or _backend() != "auto" or not configurations(capability, promote=False):
        return _CUBLASLT
    measured = gemm_table.rows(name, capability)
    if not measured:
        return f"{_OWN} or {_CUBLASLT}, measured at first use"
    faster = sum(row.is_faster for row in measured)
    return f"{_OWN} for {faster} of {len(measured)} measured, else {_CUBLASLT}; others measured at first use"


def _backend() -> str | None:
    """The value of ``LIGHTNING_FP8_BACKEND``; None if it is not valid."""
    try:
        return kernels.backend()
    except ValueError:
        return None


def _share(checks: Sequence[KernelCheck]) -> str:
    failed = sum(check.failure is not None for check in checks)
    if failed == len(checks):
        return _TORCH
    return f"{_OWN}, {_TORCH} for {failed} of {len(checks)}" if failed else _OWN
