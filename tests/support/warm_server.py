"""The server of ``processes`` imports this: Lightning, of which a fork stays to run the programs of ``warm``, and more.

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
    """Run programs, each in a fork, until the tests close the connection; what it was given are lines of JSON."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as stream:
            for line in stream:
                child = os.fork()
                if not child:
                    run(*json.loads(line))
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=stream, flush=True)


def run(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """As a Python of its own; does not return."""
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_RDWR), (2, err, os.O_RDWR)):
        os.dup2(os.open(path, flags | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # in the place of the tests' own folder
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
    # to take Lightning's modules apart would take a second
    os._exit(1 if isinstance(code, str) else code or 0)


def begin(address: str) -> None:
    """Leaves a fork that serves; what the server itself forks has all of this."""
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
    """What each fork would do again with all that was imported."""
    # a search for a source that is not found makes a table of all modules, a tenth of a second
    inspect.getmodule(compile("", "nowhere", "exec"))
    # no collection looks at it
    gc.freeze()


# pytest imports this file too, to look for examples in it
if address := os.environ.pop("WARM_SERVER", None):
    begin(address)
