"""Programs in processes of their own, which begin with Lightning imported and nothing of ``lightning_fp8``.

To import Lightning is not what these programs test. Who tests what an import does to Lightning itself starts a real
Python.
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
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``.

    Args:
        arguments: ``"-c", program``, ``"-m", module, argument...`` or ``script, argument...``
        env: the whole environment; that of the tests by default. Variables that Python itself reads come too late.
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
