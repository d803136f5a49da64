"""Compiling with NVRTC: options, errors, the cache, and the messages about an unsuitable toolchain. Needs no GPU."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import torch
from warm import run_warm

from kernels_cuda import compile as kernels_compile
from kernels_cuda.cache import cache_folder
from kernels_cuda.compile import (
    CompileError,
    KernelsUnavailable,
    architecture,
    check_driver,
    check_nvrtc,
    compile_source,
    compiled,
    nvrtc_version,
    source_key,
)

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n'


class Compiler:
    """Counts compilations, and has one family, ``twice``, whose source can be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.source = KERNEL
        self.headers: dict[str, str] = {}
        self._compile = kernels_compile.compile_source
        monkeypatch.setattr(kernels_compile, "source", lambda family: self.source)
        monkeypatch.setattr(kernels_compile, "headers", lambda: self.headers)
        monkeypatch.setattr(kernels_compile, "compile_source", self.compile)

    def compile(self, *arguments: object) -> tuple[bytes, str]:
        self.calls += 1
        return self._compile(*arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels_compile, "_private_folders", {})
    # where a folder named "~" would appear
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture
def fresh_version() -> Iterator[None]:
    nvrtc_version.cache_clear()
    yield
    nvrtc_version.cache_clear()


# --- architectures and compilation ---


def test_architecture() -> None:
    found = [architecture(capability) for capability in ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0))]
    assert found == ["sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    with pytest.raises(ValueError, match=r"8\.9 \(Ada\) or newer; this GPU has 8\.6"):
        architecture((8, 6))


@pytest.mark.parametrize("arch", ["sm_89", "sm_120a"])
def test_cubin_is_a_complete_elf(arch: str) -> None:
    cubin, log = compile_source("twice", KERNEL, arch)
    assert cubin.startswith(b"\x7fELF")
    # from the ELF header: where program and section headers start, and their sizes and counts
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    size, count, section_size, section_count = struct.unpack_from("<HHHH", cubin, 54)
    assert max(program_headers + size * count, section_headers + section_size * section_count) == len(cubin)
    assert f"'twice' for '{arch}'" in log
    assert re.search(r"Used \d+ registers", log)
    assert "0 bytes spill stores" in log
    assert "\0" not in log


def test_division_is_ieee_and_denormals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    ptx = []
    get_cubin = nvrtc.getCUBIN
    monkeypatch.setattr(nvrtc, "getCUBIN", lambda program: ptx.append(nvrtc.getPTX(program)) or get_cubin(program))
    compile_source("f", 'extern "C" __global__ void f(float* x) { *x = *x / x[1] + x[2]; }', "sm_89")
    assert "div.rn.f32" in str(ptx[0])
    assert ".ftz" not in str(ptx[0])


# the source, what the message says, and the numbered lines in it
ERRORS: dict[str, tuple[str, str, list[str]]] = {
    "in the source": (
        "// 1\n// 2\n__device__ void f() {\n    int y = undeclared;\n}\n// 6\n",
        'broken.cu(4): error: identifier "undeclared" is undefined',
        ["     3 | __device__ void f() {", ">    4 |     int y = undeclared;", "     5 | }"],
    ),
    "in a header": (
        '#include "first.cuh"\n#include "second.cuh"\n__device__ int f() { return g() + nothing; }\n',
        "second.cuh, line 1:",
        [">    1 | __device__ int g() { return nowhere; }", "     2 | // end"],
    ),
    "in a file that is not known": ('#line 7 "elsewhere"\nint f() { return nonsense; }', "elsewhere(7): error", []),
    "without a line": ('__global__ void f() { asm volatile("bogus;"); }', "'bogus'", []),
}


@pytest.mark.parametrize("error", ERRORS)
def test_error_shows_the_offending_line(error: str) -> None:
    source, said, lines = ERRORS[error]
    headers = {"first.cuh": "// nothing\n", "second.cuh": "__device__ int g() { return nowhere; }\n// end"}
    with pytest.raises(CompileError) as caught:
        compile_source("broken", source, "sm_90a", ["TILE=64"], headers)
    for part in ("'broken' for sm_90a", "-DTILE=64", said):
        assert part in str(caught.value)
    assert re.findall(r"^[> ] +\d+ \|.*$", str(caught.value), re.MULTILINE) == lines


def test_a_family_of_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(folder / "and" / "below"))
    path = compiled("update_scales", "sm_89")
    assert path.parent == folder / "and" / "below"
    assert b"update_scales" in path.read_bytes()
    with pytest.raises(ValueError, match="no kernel source 'nowhere'"):
        compiled("nowhere", "sm_89")


# --- the cache ---


def test_compiles_once(compiler: Compiler, folder: Path) -> None:
    path = compiled("twice", "sm_89")
    assert path.read_bytes().startswith(b"\x7fELF")
    assert compiled("twice", "sm_89") == path
    assert compiler.calls == 1
    assert list(folder.iterdir()) == [path]


def test_key_names_all_that_a_cubin_follows_from(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source_key("twice", "sm_89")
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert source_key("twice", "sm_89") == first
    keys = {first, source_key("twice", "sm_90a")}
    # the last two have the same letters, divided differently
    keys |= {source_key("twice", "sm_89", defines) for defines in (["A=1"], ["A=2"], ["A", "B"], ["A -DB"])}
    for headers in ({"a.cuh": "x"}, {"a.cuh": "y"}, {"a.cuhx": ""}):
        compiler.headers = headers
        keys.add(source_key("twice", "sm_89"))
    compiler.headers = {}
    compiler.source += " "
    keys.add(source_key("twice", "sm_89"))
    monkeypatch.setattr(kernels_compile, "nvrtc_version", lambda: (12, 8))
    keys.add(source_key("twice", "sm_89"))
    assert len(keys) == 11


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "renamed", "not an ELF"])
def test_damaged_files_are_replaced(compiler: Compiler, folder: Path, damage: str) -> None:
    path = compiled("twice", "sm_89")
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "renamed":
        path.rename(folder / f"{path.stem[:-16]}{'0' * 16}.cubin")
    else:
        path.unlink()
        (folder / f"{path.stem[:-16]}{hashlib.sha256(b'text').hexdigest()[:16]}.cubin").write_bytes(b"text")
    assert compiled("twice", "sm_89") == path
    assert compiler.calls == 2
    assert path.read_bytes() == content
    assert list(folder.iterdir()) == [path]


def test_other_families_are_left_alone(compiler: Compiler, folder: Path) -> None:
    folder.mkdir()
    other = folder / "twice-sm_89-0123456789abcdef-0123456789abcdef.cubin"
    other.write_bytes(b"")
    compiled("twice", "sm_89")
    assert other.exists()


def test_a_file_that_another_process_wrote_meanwhile_is_left_alone(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process may be about to load it."""
    cubin, log = compile_source("twice", KERNEL, "sm_89")
    path = compiled("twice", "sm_89")
    path.unlink()
    other = folder / f"{path.stem[:-16]}{hashlib.sha256(cubin + cubin).hexdigest()[:16]}.cubin"
    monkeypatch.setattr(
        kernels_compile, "compile_source", lambda *_: (other.write_bytes(cubin + cubin), log) and (cubin, log)
    )
    assert compiled("twice", "sm_89") == path
    assert set(folder.iterdir()) == {path, other}


def test_eight_threads_at_once(compiler: Compiler, folder: Path) -> None:
    together = threading.Barrier(8, timeout=60)

    def compile_with_others(_: int) -> Path:
        together.wait()
        return compiled("twice", "sm_89")

    with ThreadPoolExecutor(8) as pool:
        paths = [*pool.map(compile_with_others, range(8))]
    (path,) = folder.iterdir()
    assert paths == [path] * 8


def test_writing_is_seen_whole_or_not_at_all(compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = os.replace

    def watched(temporary: Path, path: Path) -> None:
        seen.append(([found.suffix for found in folder.iterdir()], temporary.parent, temporary.read_bytes()))
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", watched)
    path = compiled("twice", "sm_89")
    assert seen == [([".tmp"], folder, path.read_bytes())]


def refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def below_a_file(folder: Path, patched: pytest.MonkeyPatch) -> None:
    folder.write_text("")
    patched.setenv("LIGHTNING_FP8_CACHE_DIR", str(folder / "cache"))


def a_full_disk(folder: Path, patched: pytest.MonkeyPatch) -> None:
    """As in reality: the file exists, but its content does not match."""
    write = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> None:
        write(path, content[:9] if path.parent == folder else content)
        if path.parent == folder:
            raise OSError(errno.ENOSPC, "No space left on device")

    patched.setattr(Path, "write_bytes", write_bytes)


def a_read_only_disk(folder: Path, patched: pytest.MonkeyPatch) -> None:
    make = Path.mkdir
    patched.setattr(Path, "mkdir", lambda path, **options: refused() if path == folder else make(path, **options))


def no_home(folder: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(os.path, "expanduser", lambda path: path)
    patched.delenv("LIGHTNING_FP8_CACHE_DIR")
    patched.delenv("XDG_CACHE_HOME", raising=False)


TROUBLES = {
    "Not a directory": below_a_file,
    "No space left": a_full_disk,
    "Permission denied": a_read_only_disk,
    "no home folder": no_home,
}


@pytest.mark.parametrize("said", TROUBLES)
def test_unusable_folder(compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    with monkeypatch.context() as patched:
        TROUBLES[said](folder, patched)
        place = str(cache_folder())
        with pytest.warns(UserWarning, match="LIGHTNING_FP8_CACHE_DIR") as warned:
            path = compiled("twice", "sm_89")
        (message,) = (str(one.message) for one in warned)
        assert place in message
        assert said in message
        assert path.read_bytes().startswith(b"\x7fELF")
        assert path.parent not in (folder, folder.parent)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compiled("twice", "sm_89") == path
            assert compiler.calls == 1
            # another kernel gives no second message
            assert compiled("twice", "sm_90a").parent == path.parent
    assert not folder.is_dir() or not list(folder.iterdir())
    assert not Path("~").exists()
    kernels_compile._remove_private_folder()
    assert not path.parent.exists()


def test_a_cubin_in_a_read_only_folder_is_used(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled("twice", "sm_89")
    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(Path, "write_bytes", refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled("twice", "sm_89") == path


def test_private_folder_goes_with_its_process(tmp_path: Path) -> None:
    """A forked child does not remove it, and gets its own folder for what it compiles."""
    (tmp_path / "file").write_text("")
    script = f"""
import os, sys, warnings
import kernels_cuda.compile as kernels_compile
kernels_compile.source, kernels_compile.headers = lambda family: {KERNEL!r}, dict
warnings.simplefilter("ignore")
first = kernels_compile.compiled('twice', 'sm_89')
child = os.fork()
if child == 0:
    assert kernels_compile.compiled('twice', 'sm_89') == first
    print(kernels_compile.compiled('twice', 'sm_90a').parent)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert first.exists()
print(first.parent)
"""
    environment = {**os.environ, "LIGHTNING_FP8_CACHE_DIR": str(tmp_path / "file")}
    said = run_warm("-c", script, env=environment, check=True)
    child, parent = said.stdout.split()
    assert child != parent
    assert not Path(child).exists()
    assert not Path(parent).exists()


# --- the toolchain ---


def commands(error: pytest.ExceptionInfo[KernelsUnavailable]) -> list[str]:
    return re.findall("`(.*?)`", str(error.value))


@pytest.mark.parametrize("built_for", ["13.0", "12.8", None])
@pytest.mark.usefixtures("fresh_version")
def test_without_cupy(monkeypatch: pytest.MonkeyPatch, built_for: str | None) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(KernelsUnavailable, match="CuPy") as caught:
        compile_source("twice", KERNEL, "sm_89")
    assert commands(caught) == [f"pip install cupy-cuda{at}x" for at in ("13", "12") if at in (built_for or at)]


@pytest.mark.usefixtures("fresh_version")
def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libnvrtc.so.13:\n cannot open")

    monkeypatch.setattr(import_module("cupy_backends.cuda.libs.nvrtc"), "getVersion", missing)
    monkeypatch.setattr(import_module("cupy_backends.cuda.api.driver"), "get_build_version", lambda: 12090)
    loads: list[str] = []
    monkeypatch.setattr("kernels_cuda.compile.ctypes.CDLL", lambda path, mode: loads.append(path))
    with pytest.raises(KernelsUnavailable, match="OSError: libnvrtc") as caught:
        nvrtc_version()
    # the library of the installed wheel has been tried
    assert any("libnvrtc.so." in path for path in loads)
    assert commands(caught) == ["pip install nvidia-cuda-nvrtc-cu12"]


@pytest.mark.parametrize(
    ("capability", "cupy_version", "version", "mend"),
    [
        # CuPy takes an older NVRTC if it finds no newer one
        ((8, 9), 13020, (12, 3), ["pip install --upgrade cupy-cuda13x 'nvidia-cuda-nvrtc>=12.4'"]),
        (
            (11, 0),
            12090,
            (12, 9),
            [
                "pip uninstall -y cupy-cuda12x nvidia-cuda-nvrtc-cu12",
                "pip install --upgrade cupy-cuda13x 'nvidia-cuda-nvrtc>=13.0'",
            ],
        ),
    ],
)
@pytest.mark.usefixtures("fresh_version")
def test_old_nvrtc(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cupy_version: int,
    version: tuple[int, int],
    mend: list[str],
) -> None:
    monkeypatch.setattr(import_module("cupy_backends.cuda.libs.nvrtc"), "getVersion", lambda: version)
    monkeypatch.setattr(import_module("cupy_backends.cuda.api.driver"), "get_build_version", lambda: cupy_version)
    with pytest.raises(KernelsUnavailable, match=rf"or newer; {version[0]}\.{version[1]} was found") as caught:
        check_nvrtc(capability)
    assert commands(caught) == mend


NEWER = ["pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc", "pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"]


@pytest.mark.parametrize(
    ("driver", "nvrtc", "said", "mend"),
    [
        (12080, (12, 8), None, []),
        (13000, (13, 5), None, []),
        (14000, (13, 0), None, []),
        (12080, (13, 5), r"CUDA 12\.8 .*13\.5", NEWER),
        (11080, (12, 9), "Update the driver", []),
        (0, (13, 5), "none was found", []),
    ],
)
def test_drivers(driver: int, nvrtc: tuple[int, int], said: str | None, mend: list[str]) -> None:
    if said is None:
        return check_driver(driver, nvrtc)
    with pytest.raises(KernelsUnavailable, match=said) as caught:
        check_driver(driver, nvrtc)
    assert commands(caught) == mend
