"""GPUs, driver, CuPy and NVRTC: what is installed, and whether it is compatible."""

from __future__ import annotations

import os
import re
from functools import partial

import torch

from kernels_cuda.compile import KernelsUnavailable, cached_by_version, check_driver, nvrtc_version
from lightning_fp8.ops.cuda import layouts
from lightning_fp8.runtime.device import check_device
from lightning_fp8.runtime.environment import CUPY, driver_cuda, driver_version, package_version
from lightning_fp8.tools.doctor.diagnosis import CANNOT, SLOWER, Diagnosis
from lightning_fp8.tools.doctor.software import asked


def gpus() -> list[torch.device]:
    """Every GPU that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def describe(findings: Diagnosis, devices: list[torch.device], compiles: bool) -> bool:
    """Add GPUs, driver and toolchain; gives whether the kernels can be compiled (and, with a GPU, loaded).

    Unless kernels are to be compiled, it is no problem that CuPy is not installed.
    """
    rows = [(str(gpu), asked(partial(_description, gpu))) for gpu in devices] or [("GPU", "none")]
    rows += [(f"FP8 operands on {gpu}", asked(partial(_operands, findings, gpu))) for gpu in devices]
    driver, number = driver_cuda(), driver_version()
    cuda = f"CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no CUDA"
    rows.append(("driver", f"{number or 'version not known'}, {cuda}" if driver or number else "none"))
    installed = [f"{wheel} {version}" for wheel in CUPY if (version := package_version(wheel))]
    rows.append(("CuPy", ", ".join(installed) or "not installed"))
    if len(installed) > 1:
        findings.problem(
            SLOWER,
            f"CuPy is installed more than once ({', '.join(installed)}), and one overwrites the other's files.",
            f"pip uninstall -y {' '.join(wheel.split()[0] for wheel in installed)}, then pip install {_cupy(driver)}",
        )
    ready, nvrtc = _toolchain(findings, bool(devices), bool(installed), compiles, driver)
    rows += [("NVRTC", nvrtc), ("compiled kernels", asked(partial(_compiled, nvrtc)))]
    findings.section("GPU and toolchain", ("what", "found"), *rows)
    if not devices and number:
        _unseen(findings, number, driver)
    return ready


def _compiled(nvrtc: str) -> str:
    """What the cache folder holds, and whether it can be used here."""
    counts = cached_by_version()
    contents = ", ".join(f"{count} by NVRTC {version}" for version, count in counts.items()) or "none in the cache"
    if not counts or nvrtc in counts:
        return contents
    return f"{contents}, which is not used here: NVRTC {nvrtc} compiles its own"


def _description(gpu: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(gpu)
    memory = asked(lambda: f"{torch.cuda.get_device_properties(gpu).total_memory / 2**30:.0f} GiB")
    return f"{torch.cuda.get_device_name(gpu)}, compute capability {major}.{minor}, {memory}"


def _operands(findings: Diagnosis, gpu: torch.device) -> str:
    """Which layouts of operands products take, those with one scale for each tensor."""
    if not layouts.is_expected(gpu):
        return "K-major: casts write a payload and its transpose"
    failure = layouts.probe(gpu)
    if failure is None:
        return "every layout, tested: casts write one payload"
    findings.problem(
        SLOWER,
        f"torch._scaled_mm does not take every layout of its operands on {gpu}: {failure}",
        "Casts write a payload and its transpose instead, with the same results. `pip install --upgrade torch`.",
    )
    return "FAILED: casts write a payload and its transpose"


def _cupy(driver: int) -> str:
    """The CuPy package for this driver, or, without a driver, for torch's CUDA version."""
    built_for = int((torch.version.cuda or "13").split(".")[0])
    return f"cupy-cuda{'12' if (driver // 1000 or built_for) < 13 else '13'}x"


def _toolchain(findings: Diagnosis, has_gpu: bool, has_cupy: bool, compiles: bool, driver: int) -> tuple[bool, str]:
    try:
        version = nvrtc_version()
        if has_gpu:
            check_driver(driver, version)
    except KernelsUnavailable as error:
        if not has_cupy and not compiles:
            return False, "not looked for: it is loaded through CuPy, which only a GPU needs"
        what, do = _parted(str(error))
        findings.problem(SLOWER, what, do if has_cupy else f"pip install {_cupy(driver)}")
        return False, f"cannot be used: {str(error).split('. ')[0]}"
    except Exception as error:
        what = f"CuPy or NVRTC is broken: {type(error).__name__}: {error}"
        findings.problem(SLOWER, what, f"pip install --force-reinstall {_cupy(driver)}")
        return False, f"broken: {type(error).__name__}"
    return True, f"{version[0]}.{version[1]}"


def _parted(message: str) -> tuple[str, str]:
    """A message without the sentence that says what to do, and that sentence."""
    match = re.search(r"(?:Run|Update|Install) .*?\.(?=$| \()", message)
    if match is None:
        return message, "See the message."
    return " ".join(message.replace(match[0], "").split()), match[0]


def _unseen(findings: Diagnosis, number: str, driver: int) -> None:
    if torch.version.cuda is None:
        cause = "torch was built without CUDA"
        wheels = "cu130" if driver >= 13000 else "cu126"
        do = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheels}"
    else:
        cause = f"torch, built for CUDA {torch.version.cuda}, cannot use it"
        do = "Update the driver, or unset CUDA_VISIBLE_DEVICES where it hides the GPU."
    findings.problem(SLOWER, f"There is an NVIDIA GPU (driver {number}), but {cause}.", do)


def unfit(findings: Diagnosis, devices: list[torch.device]) -> set[torch.device]:
    """The GPUs that cannot run FP8, each a problem, which is more serious if no other GPU can."""
    reasons = {}
    for device in devices:
        try:
            check_device(device)
        except Exception as error:
            reasons[device] = str(error)
    # torch's indices count visible GPUs only
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    indices = [device.index or 0 for device in devices if device not in reasons]
    fit = ",".join(visible[index].strip() if index < len(visible) and visible[0] else str(index) for index in indices)
    do = f"export CUDA_VISIBLE_DEVICES={fit}" if fit else 'Trainer(precision="bf16-mixed"), or a newer GPU.'
    for reason in reasons.values():
        findings.problem(SLOWER if fit else CANNOT, reason, do)
    return {*reasons}
