"""Programs in separate processes, which start with Lightning imported and nothing of ``lightning_fp8``.

These programs do not test the import of Lightning. Tests of what an import does to Lightning itself start a new Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from processes import server
from repository import ROOT


def run_warm(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``.

    Args:
        arguments: ``"-c", program``, ``"-m", module, argument...`` or ``script, argument...``
        env: the whole environment; that of the tests by default. Variables that Python reads as it starts are ignored.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        environment = dict(os.environ if env is None else env)
        server().write(json.dumps([arguments, str(cwd), environment, str(out), str(err)]) + "\n")
        server().flush()
        ran = subprocess.CompletedProcess(arguments, int(server().readline()), out.read_text(), err.read_text())
    if check:
        ran.check_returncode()
    return ran
