"""From a kernel family's CUDA source to a cubin file: NVRTC through CuPy's binding, with its own on-disk cache.

Launches nothing, and needs neither a GPU nor a driver. CuPy's ``RawModule`` loads the file; its own compiler is not
used, as it chooses ``sm_90`` where wgmma needs ``sm_90a``, and forces ``-ftz=true``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

from kernels_cuda import source
from kernels_cuda.cache import Untrusted, cache_folder, check_folder, make_folder, read_trusted, write

# the first NVRTC that compiles for a compute capability, and for all others of its generation
_LEAST_NVRTC = {
    (8, 9): (12, 4),
    (9, 0): (12, 4),
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
# for another process that compiles the same kernels; after that, this one compiles them too
_LONGEST_WAIT_S = 300.0
# "relu.cu(12): error: ...", "tile.cuh(3): catastrophic error: ..."
_ERROR = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error\b", re.MULTILINE)
# by process ID: a forked child also has its parent's entry and reads there, but writes into its own folder
_private_folders: dict[int, Path] = {}
# architectures that this process has said it compiles for
_said: set[str] = set()


class KernelsUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, not a mistake
    """The toolchain or the driver is missing or does not fit; the message says which, and the command that fixes it."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log and the offending lines."""


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name for a compute capability: ``sm_89``, ``sm_90a``, ``sm_100a``, ``sm_120a``. ValueError below 8.9."""
    major, minor = capability
    if (major, minor) < (8, 9):
        raise ValueError(f"FP8 kernels need compute capability 8.9 (Ada) or newer; this GPU has {major}.{minor}.")
    # "a" is the architecture's own instruction set: wgmma and its successors exist in no other
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def capability(arch: str) -> tuple[int, int]:
    """The compute capability of a name that :func:`architecture` gives."""
    digits = arch.removeprefix("sm_").removesuffix("a")
    return int(digits[:-1]), int(digits[-1])


def _wheels(cuda_major: int) -> tuple[str, str]:
    """The names of CuPy's and of NVRTC's wheel. CUDA 12 is the oldest that works."""
    if cuda_major <= 12:
        return "cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"
    return f"cupy-cuda{cuda_major}x", "nvidia-cuda-nvrtc"


def _nvrtc() -> ModuleType:
    """CuPy's binding of NVRTC, without the rest of ``cupy``; the library itself is loaded at the first call."""
    try:
        return import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        import torch

        cuda = torch.version.cuda
        wheels = [_wheels(int(cuda.split(".")[0]))[0]] if cuda else ["cupy-cuda13x", "cupy-cuda12x"]
        commands = " or, for a driver of CUDA 12, ".join(f"`pip install {wheel}`" for wheel in wheels)
        raise KernelsUnavailable(
            f"The CUDA kernels are compiled through CuPy, which is not installed or broken ({error}). Run {commands}."
        ) from error


def _load_libraries_of_wheels() -> None:
    """Load NVRTC from its wheel, as torch does: CuPy before 14 looks only in the system's folders."""
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC library that CuPy finds. KernelsUnavailable without one."""
    nvrtc = _nvrtc()
    nvrtc_wheel = _wheels(_cuda_of_cupy())[1]
    version: tuple[int, int]
    try:
        try:
            version = nvrtc.getVersion()
        except Exception:
            _load_libraries_of_wheels()
            version = nvrtc.getVersion()
    # what is raised depends on CuPy's version and on what is wrong: RuntimeError, DynamicLibNotFoundError, OSError
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise KernelsUnavailable(
            "The CUDA kernels are compiled by NVRTC, whose library is missing or cannot be loaded. "
            f"Run `pip install {nvrtc_wheel}`. ({cause})"
        ) from error
    return version


def _cuda_of_cupy() -> int:
    return int(import_module("cupy_backends.cuda.api.driver").get_build_version()) // 1000


def least_nvrtc(capability: tuple[int, int]) -> tuple[int, int]:
    """The oldest NVRTC that compiles for GPUs of this compute capability."""
    of_generation = [version for known, version in _LEAST_NVRTC.items() if known[0] == capability[0]]
    return _LEAST_NVRTC.get(capability) or max(of_generation, default=max(_LEAST_NVRTC.values()))


def check_nvrtc(capability: tuple[int, int]) -> tuple[int, int]:
    """The version of NVRTC.

    Raises:
        KernelsUnavailable: without one, or for one that is too old for this compute capability.
    """
    version, least = nvrtc_version(), least_nvrtc(capability)
    if version < least:
        cuda = max(_cuda_of_cupy(), least[0])
        cupy_wheel, nvrtc_wheel = _wheels(cuda)
        former = "" if cuda == _cuda_of_cupy() else f"`pip uninstall -y {' '.join(_wheels(_cuda_of_cupy()))}`, then "
        raise KernelsUnavailable(
            f"Kernels for compute capability {capability[0]}.{capability[1]} need NVRTC {least[0]}.{least[1]} or newer;"
            f" {version[0]}.{version[1]} was found. Run {former}`pip install --upgrade {cupy_wheel}"
            f" '{nvrtc_wheel}>={least[0]}.{least[1]}'`."
        )
    return version


def check_driver(driver_version: int, nvrtc_version: tuple[int, int]) -> None:
    """KernelsUnavailable for a driver that cannot load what this NVRTC compiles: one of an older major version.

    Args:
        driver_version: what ``cudaDriverGetVersion`` says, 12080 for CUDA 12.8; 0 without a driver.
    """
    if driver_version == 0:
        raise KernelsUnavailable("The CUDA kernels need an NVIDIA driver, and none was found. Install or expose one.")
    driver = driver_version // 1000
    if nvrtc_version[0] <= driver:
        return
    mend = "Update the driver"
    if driver >= 12:
        # CuPy prefers the newest NVRTC, so the older one is used only once the newer one is uninstalled
        newer, fitting = " ".join(_wheels(nvrtc_version[0])), " ".join(_wheels(driver))
        mend += f", or run `pip uninstall -y {newer}`, then `pip install {fitting}`"
    raise KernelsUnavailable(
        f"The driver is for CUDA {driver}.{driver_version % 1000 // 10} and does not load what NVRTC "
        f"{nvrtc_version[0]}.{nvrtc_version[1]} compiles. {mend}."
    )


def headers() -> dict[str, str]:
    """The headers that kernel families include: text by file name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.cuh"))}


def _options(arch: str, defines: Sequence[str]) -> tuple[str, ...]:
    # `-v` writes registers and spills into the log. NVRTC's defaults stay: denormals kept, IEEE division and square
    # root
    return (f"-arch={arch}", "--std=c++17", "--ptxas-options=-v", *(f"-D{define}" for define in defines))


def _offending_lines(log: str, texts: Mapping[str, str]) -> str:
    """The line of the log's first error, with its neighbours; empty if the line is not known."""
    match = _ERROR.search(log)
    if match is None or match["file"] not in texts:
        return ""
    wrong, numbered = int(match["line"]), enumerate(texts[match["file"]].split("\n"), start=1)
    lines = (f"{'>' if n == wrong else ' '} {n:4d} | {text}" for n, text in numbered if abs(n - wrong) <= 1)
    return "\n".join((f"\n{match['file']}, line {wrong}:", *lines))


def compile_source(
    name: str, source: str, arch: str, defines: Sequence[str] = (), headers: Mapping[str, str] | None = None
) -> tuple[bytes, str]:
    """Compile one source, bypassing every cache: the cubin, and the log with registers and spills. CompileError if
    refused.

    Args:
        name: of the kernel family; ``{name}.cu`` in the log.
        source: CUDA C++.
        arch: see :func:`architecture`.
        defines: macros, as ``"TILE=64"``.
        headers: what the source includes, by name; none by default.
    """
    version, nvrtc = nvrtc_version(), _nvrtc()
    headers, options = headers or {}, _options(arch, defines)
    texts, names = (tuple(text.encode() for text in part) for part in (headers.values(), headers))
    program = nvrtc.createProgram(source, f"{name}.cu", texts, names)
    try:
        nvrtc.compileProgram(program, options)
        # CuPy drops the last byte, as if this were a string; it belongs to the ELF file and is always zero
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program).rstrip("\0\n")
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).rstrip("\0\n")
        raise CompileError(
            f"NVRTC {version[0]}.{version[1]} does not compile the kernel family {name!r} for {arch} "
            f"({error}; options: {' '.join(options)}):\n{log}{_offending_lines(log, {**headers, f'{name}.cu': source})}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _key(source: str, headers: Mapping[str, str], options: Sequence[str]) -> str:
    parts = [source, sorted(headers.items()), list(options), nvrtc_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def source_key(family: str, arch: str, defines: Sequence[str] = ()) -> str:
    """A key of all that determines a family's cubin: sha256 of source, headers, options, architecture, NVRTC
    version."""
    return _key(source(family), headers(), _options(arch, defines))


def compiled(family: str, arch: str, defines: Sequence[str] = ()) -> Path:
    """The file of the family's cubin, from the cache, or else from :func:`compile_source`.

    Its name contains a hash of its content, which has been checked, and nobody else can replace it.

    If the cache folder cannot be written or is not trusted (see :mod:`kernels_cuda.cache`), warns once and keeps the
    file until this process ends.
    """
    path = _kept(_stem(family, arch, source(family), headers(), defines))
    return path if path is not None else compile_into_cache(family, arch, defines)[0]


def compile_into_cache(family: str, arch: str, defines: Sequence[str] = ()) -> tuple[Path, str]:
    """The same, compiled in any case: the file, and the log with registers and spills."""
    text, included = source(family), headers()
    stem = _stem(family, arch, text, included, defines)
    check_nvrtc(capability(arch))
    content, log = compile_source(family, text, arch, defines, included)
    folder = cache_folder()
    try:
        return _write(folder, stem, content), log
    except OSError as error:
        if os.getpid() not in _private_folders:
            _private_folders[os.getpid()] = Path(tempfile.mkdtemp(prefix="lightning_fp8-"))
            warnings.warn(_why_not_kept(folder, error), stacklevel=2)
        return _write(_private_folders[os.getpid()], stem, content), log


def _why_not_kept(folder: Path, error: OSError) -> str:
    if isinstance(error, Untrusted):
        return f"{error} Until then kernels are compiled and tested at each start."
    return (
        f"Compiled kernels cannot be kept in {folder} ({error}): set LIGHTNING_FP8_CACHE_DIR to a writable folder;"
        " until then kernels are compiled at each start."
    )


def compile_ahead(kernels: Sequence[tuple[str, Sequence[str]]], arch: str) -> None:
    """Compile those of these kernels, by family and definitions, that are not in the cache; the process says so once.

    Other processes that share the cache, as the ranks of one machine do, wait and find them there.
    """
    if all(is_cached(family, arch, defines) for family, defines in kernels):
        return
    with _one_at_a_time(arch):
        missing = [(family, defines) for family, defines in kernels if not is_cached(family, arch, defines)]
        # what comes later, such as the cast of another activation, takes a third of a second each
        if missing and arch not in _said:
            _said.add(arch)
            seconds = max(1, round(0.4 * len(missing)))
            said = f"lightning_fp8: compiling {len(missing)} kernels for {arch}, about {seconds} s, once."
            tqdm.write(said, sys.stderr)
        # shown where a terminal is
        for family, defines in tqdm(missing, unit="kernel", leave=False, disable=None):
            compiled(family, arch, defines)


@contextlib.contextmanager
def _one_at_a_time(arch: str) -> Iterator[None]:
    """Lets one of the processes that share the cache in; all of them where the folder takes no lock."""
    # here, as it would take a quarter of the time of `import lightning_fp8`
    from filelock import FileLock, Timeout

    lock = FileLock(cache_folder() / f"{arch}.lock", timeout=_LONGEST_WAIT_S)
    try:
        make_folder(cache_folder())
        lock.acquire()
    # `compiled` says why nothing is kept
    except (OSError, Timeout, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def is_cached(family: str, arch: str, defines: Sequence[str] = ()) -> bool:
    """Whether :func:`compiled` finds the family's cubin in the cache, and compiles nothing."""
    return _kept(_stem(family, arch, source(family), headers(), defines)) is not None


def _stem(family: str, arch: str, text: str, included: Mapping[str, str], defines: Sequence[str]) -> str:
    version = "{}.{}".format(*nvrtc_version())
    return f"{family}-{arch}-nvrtc{version}-{_key(text, included, _options(arch, defines))[:16]}"


def _kept(stem: str) -> Path | None:
    for place in (cache_folder(), *_private_folders.values()):
        with contextlib.suppress(OSError):
            check_folder(place)
            for path in sorted(place.glob(f"{stem}-*.cubin")):
                if _is_whole(path, stem):
                    return path
    return None


def _is_whole(path: Path, stem: str) -> bool:
    """Whether the file's content matches the hash in its name; False for an incomplete or foreign file."""
    content = read_trusted(path)
    return content is not None and content.startswith(b"\x7fELF") and path.name == _file_name(stem, content)


def _file_name(stem: str, cubin: bytes) -> str:
    return f"{stem}-{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"


def _write(folder: Path, stem: str, cubin: bytes) -> Path:
    make_folder(folder)
    path = folder / _file_name(stem, cubin)
    write(path, cubin)
    # only now, and only under other names: another process may just have replaced an incomplete file
    for other in folder.glob(f"{stem}-*.cubin"):
        with contextlib.suppress(OSError):
            if not _is_whole(other, stem):
                other.unlink()
    return path


@atexit.register
def _remove_private_folder() -> None:
    # by process ID: a forked child runs this too, and `TemporaryDirectory` would delete its parent's folder
    if os.getpid() in _private_folders:
        shutil.rmtree(_private_folders[os.getpid()], ignore_errors=True)
