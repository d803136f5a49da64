"""Real processes for the tests, from one server that has imported everything already.

Importing Lightning takes 3 to 9 seconds of CPU time: the server does it once for all tests of a pytest process. A fork
of it, for ``warm``, has imported Lightning and nothing of ``lightning_fp8``.

On GPUs each process has its own GPU, and NCCL replaces gloo: ``python -m pytest -m cuda``.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["warm_server"])

# a time limit for a process, so that a hang ends with a failure
PATIENCE = 180

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@functools.cache
def server() -> IO[str]:
    """Starts the server; gives the connection to ``warm_server``."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listener,
        pytest.MonkeyPatch.context() as patch,
    ):
        address = str(Path(folder, "socket"))
        listener.bind(address)
        listener.listen()
        listener.settimeout(PATIENCE)
        patch.setenv("WARM_SERVER", address)
        # `multiprocessing` does not pass on the tests' path
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
        return listener.accept()[0].makefile("rw")


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    server()
    process = PROCESSES.Process(target=_begin, args=(torch.get_num_threads(), target, *arguments), daemon=True)
    process.start()
    return process


def _begin(threads: int, target: Callable[..., None], *arguments: Any) -> None:
    # as many threads as the tests' own process, so that sums have the same order
    torch.set_num_threads(threads)
    target(*arguments)


@contextmanager
def as_ranks(target: Callable[..., None], world: int, path: Path, *arguments: Any) -> Iterator[list[BaseProcess]]:
    """``target(path, *arguments)`` in processes as torchrun would start them, without a supervisor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(_as_rank, rank, world, port, target, path, *arguments) for rank in range(world)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def _as_rank(rank: int, world: int, port: int, target: Callable[..., None], path: Path, *arguments: Any) -> None:
    of_this_rank = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    for name, value in {**of_this_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ[name] = str(value)
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    try:
        target(path, *arguments)
    except BaseException:
        (path / f"error{rank}").write_text(traceback.format_exc())
        raise


def all_end_well(processes: list[BaseProcess], path: Path) -> None:
    for rank, process in enumerate(processes):
        process.join(PATIENCE)
        errors = [error.read_text() for error in sorted(path.glob("error*"))]
        assert process.exitcode == 0, "\n".join(errors) or f"rank {rank}: {process.exitcode}"


_NAMES = """
import copy
import torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert

torch.manual_seed(0)
result = {}
"""


def _run_body(path: Path, body: str, device: str) -> None:
    place = torch.device(device, int(os.environ["RANK"]) if device == "cuda" else None)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(place)
        torch.set_default_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    names: dict[str, Any] = {"device": place, "rank": dist.get_rank(), "world": dist.get_world_size()}
    exec(compile(_NAMES + body, "<body>", "exec"), names)
    torch.save(names["result"], path / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_processes(body: str, path: Path, processes: int = 2, device: str = "cpu") -> list[dict[str, Any]]:
    """Run ``body`` in one process group; gives what each process has put into ``result``.

    ``body`` knows ``device``, ``rank`` and ``world``. On a machine with fewer GPUs the test is skipped.
    """
    if device == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, here are {torch.cuda.device_count()}")
    with as_ranks(_run_body, processes, path, body, device) as ranks:
        all_end_well(ranks, path)
    return [torch.load(path / f"rank{rank}.pt", weights_only=True, map_location="cpu") for rank in range(processes)]


def run_script(source: str, path: Path, *arguments: str, world: int = 2) -> None:
    """Run a script in ``world`` processes, with ``arguments`` in ``sys.argv``; it creates its process group itself."""
    with as_ranks(_run_source, world, path, source, arguments) as ranks:
        all_end_well(ranks, path)


def _run_source(path: Path, source: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["script", *arguments]
    exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})
