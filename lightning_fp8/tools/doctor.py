"""What runs in FP8 on this machine and by which kernels, and what to install: one screen.

Exit status: 0 if FP8 runs as well as it can here, without a GPU as a reference on the CPU; 1 if it runs, but slower
than it could, or not on every GPU; 2 if it does not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from tqdm import tqdm

from kernels_cuda.cache import cache_folder, make_folder
from kernels_cuda.compile import (
    KernelsUnavailable,
    capability,
    check_driver,
    check_nvrtc,
    compile_into_cache,
    nvrtc_version,
)
from kernels_cuda.gemm_variants import configurations, grouped_configuration, mx_configuration
from lightning_fp8.ops.cuda import kernels, rule
from lightning_fp8.ops.cuda.plain import check_blocks, check_mx
from lightning_fp8.plugins.registration import register, registered
from lightning_fp8.runtime.device import Gpu, check_device, gpu_of
from lightning_fp8.runtime.environment import CUPY, driver_cuda, driver_version, package_version
from lightning_fp8.runtime.program import program
from lightning_fp8.runtime.version import __version__
from lightning_fp8.scalings.recipe import RECIPES

ARCHITECTURES = ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
FINE, SLOWER, CANNOT = 0, 1, 2
_VERDICTS = {
    FINE: "FP8 runs here as well as it can.",
    SLOWER: "FP8 runs here, but slower than it could, or not on every GPU.",
    CANNOT: "FP8 does not run here.",
}
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")


class Problem(NamedTuple):
    """Something to change.

    Attributes:
        status: 1 if FP8 runs nevertheless, but slower or not on every GPU; 2 if it does not.
        what: what is wrong.
        do: what to do, with the line to paste where there is one.
    """

    status: int
    what: str
    do: str


@dataclass
class Findings:
    """What :func:`examine` has found.

    Attributes:
        versions: what is installed, by name.
        runs: for each device and precision, by which kernels it runs; a text that begins with "no: " where it does not.
        problems: what to change, the most serious first.
    """

    versions: dict[str, str] = field(default_factory=dict)
    runs: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        return max((problem.status for problem in self.problems), default=FINE)

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {version}" for name, version in self.versions.items())]
        for device, precisions in self.runs.items():
            by_text: dict[str, list[str]] = {}
            for precision, text in precisions.items():
                by_text.setdefault(text, []).append(precision)
            lines += ["", device, *(f"  {', '.join(names)}: {text}" for text, names in by_text.items())]
        lines += ["", _VERDICTS[self.status]]
        for number, problem in enumerate(self.problems, 1):
            lines += [f"{number}. {problem.what}", f"   -> {problem.do}"]
        return "\n".join(lines)


def examine(try_kernels: bool = True) -> Findings:
    """Ask torch, CuPy and the driver what there is, by the functions that training asks; raises nothing.

    Args:
        try_kernels: whether to compile, load and check the kernels of the default recipe on each GPU.
    """
    found = Findings()
    for part in (_versions, _settings, _gpus):
        try:
            part(found)
        # a machine in a bad state may raise anything, and the other parts may show the cause
        except Exception as error:
            found.problems.append(Problem(SLOWER, f"{part.__name__[1:]}: {_in_a_line(error)}", "Please report this."))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    fit = 0
    for index in range(count):
        try:
            fit += _gpu(found, torch.device("cuda", index), try_kernels)
        except Exception as error:
            found.problems.append(Problem(SLOWER, f"GPU {index}: {_in_a_line(error)}", "Please report this."))
    found.runs["CPU"] = dict.fromkeys(("bf16-mixed", "bf16-true"), "yes")
    found.runs["CPU"] |= dict.fromkeys(RECIPES, "as a reference, slower than bf16")
    if count and not fit:
        unfit = [problem for problem in found.problems if problem.do is _OTHER_PRECISION]
        found.problems = [problem for problem in found.problems if problem not in unfit]
        found.problems += [problem._replace(status=CANNOT) for problem in unfit]
    found.problems = sorted(dict.fromkeys(found.problems), key=lambda problem: -problem.status)
    return found


_OTHER_PRECISION = 'Trainer(precision="bf16-mixed") on this GPU.'


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _versions(found: Findings) -> None:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    built = f"ROCm {torch.version.hip}" if torch.version.hip else cuda
    found.versions |= {"lightning-fp8": __version__, "Python": platform.python_version()}
    found.versions |= {"torch": f"{torch.__version__} ({built})", "lightning": package_version("lightning") or "-"}
    installed = [f"{wheel} {version}" for wheel in CUPY if (version := package_version(wheel))]
    found.versions["CuPy"] = ", ".join(installed) or "none"
    number, driver = driver_version(), driver_cuda()
    found.versions["driver"] = f"{number or '-'} (CUDA {_dotted(driver)})" if driver else "none"
    if len(installed) > 1:
        names = " ".join(name.split()[0] for name in installed)
        do = f"pip uninstall -y {names}, then pip install {_cupy_for(driver)}"
        found.problems.append(Problem(SLOWER, "CuPy is installed more than once, and one overwrites the other.", do))
    if not registered():
        try:
            register()
        except RuntimeError as error:
            do = "Trainer(plugins=lightning_fp8.Fp8Precision())"
            found.problems.append(Problem(SLOWER, f'Lightning does not know "fp8-delayed": {error}', do))


def _settings(found: Findings) -> None:
    do = "unset LIGHTNING_FP8_BACKEND"
    try:
        backend = rule.backend()
    except ValueError as error:
        found.problems.append(Problem(CANNOT, str(error), do))
    else:
        if backend != "auto":
            what = f"LIGHTNING_FP8_BACKEND={backend} overrides the choice of kernels."
            found.problems.append(Problem(SLOWER, what, do))
    try:
        make_folder(cache_folder())
        if not os.access(cache_folder(), os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        what = f"Compiled kernels are not kept in {cache_folder()}, so each start compiles them again: {error}"
        found.problems.append(Problem(SLOWER, what, "export LIGHTNING_FP8_CACHE_DIR=/a/folder/of/your/own"))


def _gpus(found: Findings) -> None:
    """A GPU that the driver sees and torch does not."""
    driver = driver_cuda()
    if torch.cuda.is_available() or not (driver or driver_version()):
        return
    if torch.version.cuda is None:
        wheels = "cu130" if driver >= 13000 else "cu126"
        do = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheels}"
        found.problems.append(Problem(SLOWER, "There is an NVIDIA GPU, and torch is built without CUDA.", do))
    else:
        what = f"There is an NVIDIA driver (CUDA {_dotted(driver)}); torch for CUDA {torch.version.cuda} sees no GPU."
        do = "Update the driver, or unset CUDA_VISIBLE_DEVICES where it hides the GPU."
        found.problems.append(Problem(SLOWER, what, do))


def _gpu(found: Findings, device: torch.device, try_kernels: bool) -> bool:
    """What runs on a GPU; whether FP8 does."""
    gpu = gpu_of(device) or Gpu("unknown", (0, 0), 0)
    major, minor = gpu.capability
    name = f"{device}: {gpu.name}, compute capability {major}.{minor}"
    found.runs[name] = runs = dict.fromkeys(("bf16-mixed", "bf16-true"), "yes" if major >= 8 else "no: no bf16")
    try:
        check_device(device)
    except RuntimeError as error:
        runs |= dict.fromkeys(RECIPES, f"no: {error}")
        found.problems.append(Problem(SLOWER, str(error), _OTHER_PRECISION))
        return False
    has_kernels = _toolchain(found, gpu.capability)
    if has_kernels and try_kernels:
        has_kernels = _try(found, device, gpu.capability)
    casts = "own casts" if has_kernels else "torch's casts, slower"
    ours = has_kernels and rule.backend() in ("auto", "kernels")
    plain, blocks = configurations((major, minor)), configurations((major, minor), in_blocks=True)
    products = "own GEMM for gradients, cuBLASLt else" if ours and plain else "cuBLASLt"
    groups = ours and grouped_configuration((major, minor), True)
    text = f"yes: {casts}, {products}, experts {'in groups' if groups else 'one by one'}"
    runs |= {"fp8-delayed": text, "fp8-current": text}
    for precision, kernel, check in (
        ("fp8-block", blocks, lambda: check_blocks((major, minor), torch.version.cuda)),
        ("fp8-mx", mx_configuration((major, minor)), lambda: check_mx((major, minor))),
    ):
        if ours and kernel:
            runs[precision] = f"yes: {casts}, own GEMM"
            continue
        try:
            check()
        except RuntimeError as error:
            # without "fp8-... has no ... here: "
            runs[precision] = f"no: {str(error).partition(': ')[2]}"
        else:
            runs[precision] = f"yes: {casts}, cuBLASLt"
    return True


def _toolchain(found: Findings, capability: tuple[int, int]) -> bool:
    """Whether kernels can be compiled and loaded for a GPU."""
    try:
        check_driver(driver_cuda(), check_nvrtc(capability))
    except KernelsUnavailable as error:
        what, do = _parted(str(error))
        found.problems.append(Problem(SLOWER, f"{what} Casts are slower without our kernels.", do))
        return False
    found.versions.setdefault("NVRTC", ".".join(map(str, nvrtc_version())))
    return True


def _parted(message: str) -> tuple[str, str]:
    """A message without the sentence that says what to do; and that sentence, or the command alone."""
    match = re.search(r"(?:Run|Update|Install) .*?\.(?=$| \()", message)
    if match is None:
        return message, "See the message."
    command = re.fullmatch(r"Run `([^`]+)`\.", match[0])
    return " ".join(message.replace(match[0], "").split()), match[0] if command is None else command[1]


def _try(found: Findings, device: torch.device, capability: tuple[int, int]) -> bool:
    """Compile, load and check the kernels of the default recipe; whether the casts may be used."""
    variants = kernels.variants(capability)
    failed = []
    for variant in tqdm(variants, desc=f"kernels on {device}", leave=False, disable=None):
        attempt = kernels.try_kernel(variant, device, check_again=True)
        if attempt.failure is not None:
            failed.append(variant)
            what = f"{variant.family} on {device}: {' '.join(attempt.failure.split())}"
            do = f"torch's operators take over. Please report this: {variant.name}"
            if not any(problem.what == what for problem in found.problems):
                found.problems.append(Problem(SLOWER, what, do))
        if attempt.unavailable:
            return False
    return not any(variant.family.startswith("cast") for variant in failed)


def compile_for(arch: str, say: Callable[[str], None]) -> bool:
    """Compile every kernel for an architecture without a GPU, into the cache; whether all compile.

    ``say`` is given a line with the number of kernels, seconds, and the most registers and spilled bytes of a thread.
    """
    say(f"{arch}: ")
    try:
        check_nvrtc(capability(arch))
    except KernelsUnavailable as error:
        say(f"{error}\n")
        return False
    began, failures, registers, spills = time.perf_counter(), [], 0, 0
    variants = kernels.variants(capability(arch), every=True)
    for variant in tqdm(variants, leave=False, disable=None):
        try:
            _, log = compile_into_cache(variant.family, arch, variant.defines)
        except Exception as error:
            failures.append(f"  {variant.name}: {_in_a_line(error)}\n")
            continue
        registers = max([registers, *map(int, _REGISTERS.findall(log))])
        spills = max([spills, *map(int, _SPILLS.findall(log))])
    seconds = time.perf_counter() - began
    say(f"{len(variants) - len(failures)} of {len(variants)} kernels in {seconds:.0f} s, at most {registers} registers")
    say(f" and {spills} bytes spilled\n{''.join(failures)}")
    return not failures


def main(arguments: Sequence[str]) -> NoReturn:
    """Print what :func:`examine` finds, or compile, and exit with the status."""
    parser = argparse.ArgumentParser(prog=f"{program()} doctor", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="compile and check no kernels")
    every = f"compile every kernel for these, by default {', '.join(ARCHITECTURES)}; no GPU needed"
    parser.add_argument("--compile", nargs="*", choices=ARCHITECTURES, metavar="ARCH", help=every)
    options = parser.parse_args(arguments)
    if options.compile is not None:
        chosen = dict.fromkeys(options.compile or ARCHITECTURES)
        results = [compile_for(arch, lambda text: print(text, end="", flush=True)) for arch in chosen]
        sys.exit(FINE if all(results) else SLOWER)
    found = examine(try_kernels=not options.quick)
    print(found)
    sys.exit(found.status)


def _cupy_for(driver: int) -> str:
    """The CuPy package for this driver, or, without a driver, for torch's CUDA version."""
    cuda = driver // 1000 or int((torch.version.cuda or "13").split(".")[0])
    return f"cupy-cuda{12 if cuda < 13 else 13}x"


def _dotted(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"
