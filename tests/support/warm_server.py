"""Imported by the server of ``processes``: it imports Lightning, forks the process that runs ``warm``'s programs, and
then imports the rest.

A machine with a GPU need not have all of it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import sys
import traceback
from contextlib import suppress


def serve(address: str) -> None:
    """Run programs, each in a fork, until the tests close the connection; each request is a line of JSON."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as stream:
            for line in stream:
                child = os.fork()
                if not child:
                    run(*json.loads(line))
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=stream, flush=True)


def run(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """Runs a program as a new Python would; does not return."""
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_RDWR), (2, err, os.O_RDWR)):
        os.dup2(os.open(path, flags | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # instead of the tests' own folder
    sys.path[:] = [cwd, *(path for path in sys.path[1:] if path != os.path.dirname(__file__))]
    kind, *rest = arguments
    sys.argv = [kind, *rest[kind in ("-c", "-m") :]]
    code: int | str | None = 0
    try:
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # freeing Lightning's modules would take a second
    os._exit(1 if isinstance(code, str) else code or 0)


def begin(address: str) -> None:
    """Forks the process that serves programs; the server itself can import more afterwards."""
    import lightning.pytorch.cli  # noqa: F401

    settle()
    if not os.fork():
        serve(address)
        os._exit(0)
    for name in (
        "lightning_fp8",
        "pytest",
        "torchdata.stateful_dataloader",
        "torch._dynamo.testing",
        "torch._inductor.pattern_matcher",
        "torch.distributed.checkpoint.state_dict",
        "cupy",
    ):
        with suppress(ImportError):
            importlib.import_module(name)
    settle()


def settle() -> None:
    """Does once what each fork would otherwise repeat for all imported modules."""
    # the first failing search for a source makes a table of all modules, which takes a tenth of a second
    inspect.getmodule(compile("", "nowhere", "exec"))
    # the garbage collector skips these objects
    gc.freeze()


# pytest imports this file too, to look for examples in it
if address := os.environ.pop("WARM_SERVER", None):
    begin(address)
