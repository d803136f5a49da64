"""Cached files are used only where no other user could have written them; files that are refused are named.

As root, the tests make other owners by ``chown``; otherwise the system call is made to report them.
"""

from __future__ import annotations

import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from warm import run_warm

from kernels_cuda import cache, load
from kernels_cuda import compile as kernels_compile
from kernels_cuda.cache import Untrusted, cache_folder, check_folder, make_folder, read
from kernels_cuda.compile import compiled, is_cached
from lightning_fp8.ops.cuda import gemm_table
from lightning_fp8.runtime.warn_once import warn_once

# the compiled code, and code that someone else would have the GPU run
OURS, THEIRS = b"\x7fELF ours", b"\x7fELF theirs"
NAME, OTHER_USER = "NVIDIA H200", 12345
ROW = {
    "m": 64, "n": 64, "k": 64, "promote": False, "output": "bfloat16", "configuration": None, "splits": 1,
    "p50_us": None, "cublaslt_p50_us": 2.0,
}  # fmt: skip
MARK = ("update_scales", (), 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current user's empty cache, a compiler that takes no time, and an H200 as far as torch can tell."""
    (tmp_path / "cache").mkdir(mode=0o755)
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels_compile, "_private_folders", {})
    monkeypatch.setattr(kernels_compile, "compile_source", lambda *_: (OURS, ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: NAME)
    monkeypatch.setattr(load, "_driver_version", lambda: 13000)
    for function in (cache._say_once, warn_once, gemm_table.rows):
        function.cache_clear()
    yield tmp_path / "cache"
    kernels_compile._remove_private_folder()
    gemm_table.rows.cache_clear()


@contextmanager
def said() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the owner of a file or folder."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, -1)
    else:
        inode = path.stat().st_ino
        tell_owners(monkeypatch, lambda found: OTHER_USER if found.st_ino == inode else found.st_uid)


def tell_owners(monkeypatch: pytest.MonkeyPatch, owner: Callable[[os.stat_result], int]) -> None:
    fstat, of_path = os.fstat, Path.stat

    def told(found: os.stat_result) -> os.stat_result:
        fields = list(found)
        fields[stat.ST_UID] = owner(found)
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", lambda descriptor: told(fstat(descriptor)))
    monkeypatch.setattr(Path, "stat", lambda path, **options: told(of_path(path, **options)))


def planted(folder: Path, content: bytes = THEIRS) -> Path:
    """A valid file that the cache would accept for the kernel: source, options and checksum match its name."""
    stem = kernels_compile._stem(
        "update_scales", "sm_90a", kernels_compile.source("update_scales"), kernels_compile.headers(), ()
    )
    path = folder / kernels_compile._file_name(stem, content)
    path.write_bytes(content)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_planted_file_would_be_used(folder: Path) -> None:
    """It is used in the user's own folder and file; otherwise the tests below would prove nothing."""
    path = planted(folder)
    with said() as messages:
        assert compiled("update_scales", "sm_90a") == path
    assert messages == []


# --- folders ---

FOLDERS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str, bool]] = {
    "everybody may write": (lambda path, _: path.chmod(0o777), r"everybody may write there \(mode 777\)", True),
    "others may write": (lambda path, _: path.chmod(0o757), r"everybody may write there \(mode 757\)", True),
    "a group may write": (lambda path, _: path.chmod(0o775), r"group \d+ may write there \(mode 775\)", True),
    "as /tmp is": (lambda path, _: path.chmod(0o1777), r"everybody may write there \(mode 1777\)", False),
    "somebody else's": (give_away, r"it belongs to user \d+, who is neither you \(user \d+\) nor root", False),
}


@pytest.fixture(params=FOLDERS)
def untrusted(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Why the folder with a kernel is not used, and whether ``chmod`` would make it usable."""
    spoil, why, can_be_mended = FOLDERS[request.param]
    planted(folder)
    spoil(folder, monkeypatch)
    return why, can_be_mended


def test_kernels_of_an_untrusted_folder_are_not_used(folder: Path, untrusted: tuple[str, bool]) -> None:
    why, can_be_mended = untrusted
    before = set(folder.iterdir())
    with said() as messages:
        first = compiled("update_scales", "sm_90a")
        compiled("cast_weights", "sm_90a")
        assert compiled("update_scales", "sm_90a") == first
    assert first.read_bytes() == OURS
    assert first.parent != folder
    assert mode(first.parent) == 0o700
    assert set(folder.iterdir()) == before
    (message,) = messages
    assert re.search(rf"{re.escape(str(folder))} is not used: {why}\.", message)
    assert (f"`chmod -R go-w {folder}`" in message) is can_be_mended
    assert "set LIGHTNING_FP8_CACHE_DIR to" in message.replace("Set", "set")


def test_passes_in_an_untrusted_folder_are_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load.remember_pass(*MARK)
    assert load.has_passed(*MARK)
    for spoil, *_ in FOLDERS.values():
        with monkeypatch.context() as patched:
            spoil(folder, patched)
            assert not load.has_passed(*MARK)
            load.remember_pass("cast_weights", (), 0)
        folder.chmod(0o755)
        os.chown(folder, os.geteuid(), -1)
        assert [path.name.split("-")[0] for path in folder.iterdir()] == ["update_scales"]
    assert load.has_passed(*MARK)


@pytest.mark.usefixtures("untrusted")
def test_tables_in_an_untrusted_folder_are_left_out(folder: Path, untrusted: tuple[str, bool]) -> None:
    gemm_table.own_path(NAME).write_text(json.dumps({"rows": [ROW]}))
    with said() as messages:
        assert gemm_table.rows.__wrapped__(NAME, (9, 0)) == ()
    (message,) = messages
    assert "is left out of account" in message
    assert re.search(untrusted[0], message)


def test_a_folder_of_roots_serves_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by an administrator: another user reads there, but cannot write."""
    path = planted(folder)
    load.remember_pass(*MARK)
    me = os.geteuid()
    if me != 0:
        tell_owners(monkeypatch, lambda found: 0 if found.st_uid == me else found.st_uid)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    with said() as messages:
        assert compiled("update_scales", "sm_90a") == path
        assert load.has_passed(*MARK)
    assert messages == []


def test_a_link_to_a_folder_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Caches are links where home folders are small; the target of the link decides."""
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "link"))
    assert compiled("update_scales", "sm_90a").parent == tmp_path / "link"
    folder.chmod(0o777)
    with pytest.raises(Untrusted):
        check_folder(tmp_path / "link")


# --- files ---


def link(path: Path, _: pytest.MonkeyPatch) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def dead_link(path: Path, _: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def pipe(path: Path, _: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FILES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "everybody may write": (lambda path, _: path.chmod(0o666), r"everybody may write there \(mode 666\).*`chmod go-w "),
    "a group may write": (lambda path, _: path.chmod(0o664), r"group \d+ may write there \(mode 664\).*`chmod go-w "),
    "a link": (link, r"it is a symbolic link\. Delete it"),
    "a dead link": (dead_link, r"it is a symbolic link\. Delete it"),
    "a pipe": (pipe, r"it is not a regular file\. Delete it"),
}


@pytest.mark.parametrize("kind", FILES)
def test_untrusted_files_are_named_and_compiled_anew(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, why = FILES[kind]
    # with the name of the compiled file, so that it would have to be replaced; and with another name
    paths = [planted(folder, content) for content in (OURS, THEIRS)]
    for path in paths:
        spoil(path, monkeypatch)
    with said() as messages:
        first = compiled("update_scales", "sm_90a")
        assert compiled("update_scales", "sm_90a") == first == paths[0]
    assert len(messages) == 2
    for path in paths:
        assert any(re.search(rf"{re.escape(str(path))} is not used: {why}", message) for message in messages)
    assert not paths[0].is_symlink()
    assert (paths[0].read_bytes(), mode(paths[0])) == (OURS, 0o644)
    assert not os.path.lexists(paths[1])
    if kind == "a link":
        assert (folder / "elsewhere").read_bytes() == THEIRS
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("kind", FILES)
def test_untrusted_passes_are_named_and_not_believed(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, why = FILES[kind]
    load.remember_pass(*MARK)
    (path,) = folder.iterdir()
    spoil(path, monkeypatch)
    with said() as messages:
        assert not load.has_passed(*MARK)
        assert not load.has_passed(*MARK)
    (message,) = messages
    assert re.search(rf"{re.escape(str(path))} is not used: {why}", message)
    load.remember_pass(*MARK)
    assert load.has_passed(*MARK)
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("kind", FILES)
def test_untrusted_tables_are_named_and_left_out(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, why = FILES[kind]
    path = gemm_table.own_path(NAME)
    gemm_table.write(path, {"gpu": NAME}, [ROW])
    assert len(gemm_table.rows.__wrapped__(NAME, (9, 0))) == 1
    spoil(path, monkeypatch)
    with said() as messages:
        assert gemm_table.rows.__wrapped__(NAME, (9, 0)) == ()
    (message,) = messages
    assert re.search(why, message)
    assert str(path) in message


def test_a_file_of_somebody_elses_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = planted(folder)
    give_away(path, monkeypatch)
    with pytest.raises(Untrusted, match=r"belongs to user \d+, who is neither you .* Delete it, or let root own it"):
        read(path)


def test_the_file_that_is_looked_at_is_the_one_that_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced between check and read: at worst the old content is read, and never the new."""
    path, fstat = planted(folder, OURS), os.fstat
    (folder / "other").write_bytes(THEIRS)

    def swapping(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        if (folder / "other").exists():
            os.replace(folder / "other", path)
        return found

    monkeypatch.setattr(os, "fstat", swapping)
    assert read(path) == OURS
    assert path.read_bytes() == THEIRS


# --- what is made ---


@pytest.mark.parametrize(("umask", "of_files", "of_folders"), [(0, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_what_is_made_is_for_its_owner_to_write(
    umask: int, of_files: int, of_folders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b" / "c"
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(folder))
    before = os.umask(umask)
    try:
        compiled("update_scales", "sm_90a")
        load.remember_pass(*MARK)
        gemm_table.write(gemm_table.own_path(NAME), {"gpu": NAME}, [])
    finally:
        os.umask(before)
    assert {mode(place) for place in (folder, *folder.parents[:2])} == {of_folders}
    assert {path.suffix: mode(path) for path in folder.iterdir()} == dict.fromkeys(
        (".cubin", ".passed", ".json", ".lock"), of_files
    )


def test_a_lock_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    path = gemm_table.own_path(NAME)
    (folder / f".{path.name}.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        gemm_table.write(path, {"gpu": NAME}, [])
    assert (tmp_path / "precious").read_text() == "text"


def test_a_folder_that_somebody_made_meanwhile_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def beaten(path: Path, **options: int) -> None:
        mkdir(path)
        path.chmod(0o777)
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", beaten)
    with pytest.raises(Untrusted, match="everybody may write there"):
        make_folder(tmp_path / "new")


# --- where it is ---


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    default = tmp_path / ".cache" / "lightning_fp8"
    for chosen, standard, expected in [
        ("/own", "/standard", Path("/own")),
        ("~/own", "/standard", tmp_path / "own"),
        ("", "/standard", Path("/standard/lightning_fp8")),
        (None, "/standard", Path("/standard/lightning_fp8")),
        (None, "", default),
        (None, None, default),
        # the XDG specification ignores relative paths
        (None, "standard", default),
        (None, "./standard", default),
        (None, "~/standard", default),
        ("own/below", None, tmp_path / "own" / "below"),
        ("../own", None, tmp_path.parent / "own"),
    ]:
        for name, value in (("LIGHTNING_FP8_CACHE_DIR", chosen), ("XDG_CACHE_HOME", standard)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert cache_folder() == expected


def test_a_relative_folder_stays_where_it_was_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", f"own-{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    path = compiled("update_scales", "sm_90a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert path.parent == cache_folder() == tmp_path / f"own-{tmp_path.name}"
    assert is_cached("update_scales", "sm_90a")


def test_without_user_numbers(folder: Path) -> None:
    """As on Windows, which has no user numbers and no such flags."""
    planted(folder).chmod(0o666)
    folder.chmod(0o777)
    script = f"""
import os
from pathlib import Path
del os.geteuid, os.getuid, os.O_NOFOLLOW, os.O_NONBLOCK
import lightning_fp8
from kernels_cuda.cache import check_folder, read
(path,) = Path({str(folder)!r}).iterdir()
check_folder(path.parent)
assert read(path) == {THEIRS!r}
"""
    run_warm("-c", script, check=True)
