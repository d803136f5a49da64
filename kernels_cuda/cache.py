"""The cache folder of compiled kernels, and of the checks that they have passed, and whose files it trusts.

A cubin is code that the GPU runs, and a recorded pass skips its check. So nothing that another user may have put
there is used: the folder and each file in it must belong to the user of this process or to root, and nobody else may
write there, group included; files must be regular ones, and no symbolic links. The folder itself may be reached
through links. An administrator shares a cache by setting ``LIGHTNING_FP8_CACHE_DIR`` to a folder that root owns; a
folder that a group may write in is refused, because its members would only replace each other's files.

A file is checked through the descriptor from which it is then read, so nothing can change in between. The driver reads
a cubin again, from the folder in which only the user and root can replace it. Where there are no user IDs (Windows),
owner and mode are not checked.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import uuid
import warnings
from pathlib import Path

_FOREIGN_WRITE = stat.S_IWGRP | stat.S_IWOTH
# a link is not followed, and a named pipe that nobody writes to does not block
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Untrusted(OSError):  # noqa: N818 - a state of the machine, not a mistake
    """A file or folder that another user may have written; the message says where it is, why it is not used, and what
    to do."""


def cache_folder() -> Path:
    """``$LIGHTNING_FP8_CACHE_DIR``, else ``lightning_fp8`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``; absolute.

    A relative ``LIGHTNING_FP8_CACHE_DIR`` is resolved against the working directory at the first call. A relative
    ``XDG_CACHE_HOME`` is ignored, as the XDG Base Directory Specification says.
    """
    standard = os.environ.get("XDG_CACHE_HOME", "")
    standard = standard if os.path.isabs(standard) else "~/.cache"
    chosen = os.environ.get("LIGHTNING_FP8_CACHE_DIR") or os.path.join(standard, "lightning_fp8")
    return _absolute(os.path.expanduser(chosen))


@functools.cache
def _absolute(path: str) -> Path:
    # without a home folder "~" stays, and must not become a folder of that name
    return Path(path if path.startswith("~") else os.path.abspath(path))


def check_folder(folder: Path) -> None:
    """Refuse a folder in which others may write.

    Raises:
        Untrusted: for such a folder.
        OSError: if there is none.
    """
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    why = _why_untrusted(status)
    if why is None:
        return
    mend = "Set LIGHTNING_FP8_CACHE_DIR to a folder of your own"
    # not for a shared folder such as /tmp, which is meant to be written by many
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        mend = f"Run `chmod -R go-w {folder}`, or set LIGHTNING_FP8_CACHE_DIR to another folder"
    raise Untrusted(f"The cache folder {folder} is not used: {why}. {mend}.")


def read(path: Path) -> bytes:
    """The content of a file in a folder that :func:`check_folder` has passed.

    Raises:
        Untrusted: for a file that others may have written.
        OSError: if there is none, or it cannot be read.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Untrusted(f"{path} is not used: it is a symbolic link. Delete it.") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted(f"{path} is not used: it is not a regular file. Delete it.")
        why = _why_untrusted(status)
        if why is not None:
            mend = f"or run `chmod go-w {path}`" if status.st_uid == os.geteuid() else "or let root own it"
            raise Untrusted(f"{path} is not used: {why}. Delete it, {mend}.")
        return file.read()


def read_trusted(path: Path) -> bytes | None:
    """:func:`read`, with None for an error, and one warning for a file that is not trusted."""
    try:
        return read(path)
    except Untrusted as error:
        _say_once(str(error))
    except OSError:
        pass
    return None


def write(path: Path, content: bytes) -> None:
    """Write a file atomically; others may at most read it.

    Until it is complete, its name is unique over the threads, processes and hosts that share the folder.
    """
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        # unlike `mkstemp`'s, others can read it
        temporary.touch(mode=0o644, exist_ok=False)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, writable only by their owner whatever the umask, and check it.

    Raises:
        Untrusted: if it exists and others may write in it.
        OSError: if it cannot be made.
    """
    if str(folder).startswith("~"):
        raise FileNotFoundError("the user has no home folder")
    _make(folder)
    check_folder(folder)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o755)
    except FileNotFoundError:
        _make(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)
    except OSError:
        if not folder.is_dir():
            raise


def _why_untrusted(status: os.stat_result) -> str | None:
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, who is neither you (user {os.geteuid()}) nor root"
    if status.st_mode & _FOREIGN_WRITE:
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        return f"{who} may write there (mode {stat.S_IMODE(status.st_mode):o})"
    return None


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
