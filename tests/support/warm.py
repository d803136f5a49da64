"""Programs in processes of their own, which begin with Lightning imported and nothing of ``lightning_fp8``.

Importing Lightning takes 3 to 6 seconds of a CPU and is not what these programs test: a server does it once for all
the tests of a pytest process, and forks. Who tests what an import does to Lightning itself starts a real Python.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from repository import ROOT


def run_warm(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``.

    Args:
        arguments: ``"-c", program`` or ``"-m", module, argument...``
        env: the whole environment; that of the tests by default. Variables that Python itself reads come too late.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        environment = dict(os.environ if env is None else env)
        server.stdin.write(json.dumps([arguments, str(cwd), environment, str(out), str(err)]) + "\n")
        server.stdin.flush()
        ran = subprocess.CompletedProcess(arguments, int(server.stdout.readline()), out.read_text(), err.read_text())
    if check:
        ran.check_returncode()
    return ran


@functools.cache
def _server() -> subprocess.Popen[str]:
    # it ends with its input, which ends with this process
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve() -> list[str]:
    """Returns in forked processes only, with the arguments of a program."""
    import lightning.pytorch.cli  # noqa: F401

    # no collection in a program looks at what was imported here
    gc.freeze()
    for line in sys.stdin:
        arguments, cwd, environment, out, err = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_RDWR), (2, err, os.O_RDWR)):
            os.dup2(os.open(path, flags | os.O_CREAT), descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        # in the place of the tests' own folder
        sys.path[0] = cwd
        return arguments
    sys.exit()


def _run(kind: str, program: str, *rest: str) -> int | str | None:
    sys.argv = [kind, *rest]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = _run(*_serve())
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # to take Lightning's modules apart would take a second
    os._exit(1 if isinstance(code, str) else code or 0)
