"""Cached files are used only where no other user could have written them; files that are refused are named.

As root, the tests make other owners by ``chown``; otherwise the system call is made to report them.
"""

from __future__ import annotations

import os
import runpy
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels_cuda import cache, load
from kernels_cuda import compile as kernels_compile
from kernels_cuda.cache import Untrusted, cache_folder, check_folder, make_folder, read
from kernels_cuda.compile import compiled, is_cached
from lightning_fp8.runtime.warn_once import warn_once

# the compiled code, and code that someone else would have the GPU run
OURS, THEIRS = b"\x7fELF ours", b"\x7fELF theirs"
OTHER_USER = 12345
MARK = ("update_scales", (), 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current user's empty cache, a compiler that takes no time, and an H200 as far as torch can tell."""
    (tmp_path / "cache").mkdir(mode=0o755)
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels_compile, "_private_folders", {})
    monkeypatch.setattr(kernels_compile, "compile_source", lambda *_: (OURS, ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(load, "_driver_version", lambda: 13000)
    for function in (cache._say_once, warn_once):
        function.cache_clear()
    yield tmp_path / "cache"
    kernels_compile._remove_private_folder()


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

FOLDERS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], bool]] = {
    "everybody may write": (lambda path, _: path.chmod(0o777), True),
    "a group may write": (lambda path, _: path.chmod(0o775), True),
    "as /tmp is": (lambda path, _: path.chmod(0o1777), False),
    "belongs to user": (give_away, False),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_nothing_of_an_untrusted_folder_is_used(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, can_be_mended = FOLDERS[kind]
    load.remember_pass(*MARK)
    planted(folder)
    before = set(folder.iterdir())
    spoil(folder, monkeypatch)
    with said() as messages:
        first = compiled("update_scales", "sm_90a")
        compiled("cast_weights", "sm_90a")
        assert compiled("update_scales", "sm_90a") == first
        assert not load.has_passed(*MARK)
        load.remember_pass("cast_weights", (), 0)
    assert first.read_bytes() == OURS
    assert mode(first.parent) == 0o700
    assert set(folder.iterdir()) == before
    (message,) = messages
    assert str(folder) in message
    assert ("belongs to user" if kind == "belongs to user" else "may write there") in message
    # whether `chmod` would make it usable
    assert (f"`chmod -R go-w {folder}`" in message) is can_be_mended
    folder.chmod(0o755)
    if kind != "belongs to user":
        assert load.has_passed(*MARK)


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
    "everybody may write": (lambda path, _: path.chmod(0o666), "everybody may write there"),
    "a group may write": (lambda path, _: path.chmod(0o664), "group"),
    "a link": (link, "symbolic link"),
    "a dead link": (dead_link, "symbolic link"),
    "a pipe": (pipe, "not a regular file"),
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
        assert any(str(path) in message and why in message for message in messages)
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
    assert str(path) in message
    assert why in message
    load.remember_pass(*MARK)
    assert load.has_passed(*MARK)
    assert not (folder / "nowhere").exists()


def test_a_file_of_somebody_elses_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = planted(folder)
    give_away(path, monkeypatch)
    with pytest.raises(Untrusted, match=f"belongs to user {OTHER_USER}"):
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
    finally:
        os.umask(before)
    assert {mode(place) for place in (folder, *folder.parents[:2])} == {of_folders}
    assert {path.suffix: mode(path) for path in folder.iterdir()} == dict.fromkeys((".cubin", ".passed"), of_files)


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


def test_without_user_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which has no user numbers and no such flags."""
    path = planted(folder)
    path.chmod(0o666)
    folder.chmod(0o777)
    for name in ("geteuid", "getuid", "O_NOFOLLOW", "O_NONBLOCK"):
        monkeypatch.delattr(os, name)
    module = runpy.run_path(cache.__file__)
    module["check_folder"](folder)
    assert module["read"](path) == THEIRS
