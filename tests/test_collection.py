"""What the tests import: never each other, and on a GPU nothing that such a machine may lack."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

INSTALLED = ("torch", "lightning", "torchmetrics", "cupy-cuda13x", "numpy", "pytest", "transformers")
# For a new interpreter that cannot find the other packages or their metadata, and seems to have a GPU.
COLLECT = """
import json, sys
from importlib.machinery import PathFinder

hidden = json.loads(sys.argv[1])

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden["modules"] else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = PathFinder.find_distributions(*context)
        return (one for one in found if one.name.lower() not in hidden["packages"])

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
import pytest, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
status = pytest.main(["--collect-only", "-q", "-m", "cuda", "-p", "no:cacheprovider", *sys.argv[2:]])

import lightning_fp8

assert "rich" not in sys.modules
sys.exit(status)
"""


def without_options() -> dict[str, str]:
    """The environment without a user's options, which would change the output."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}


def with_requirements(names: tuple[str, ...]) -> set[str]:
    """These packages and all their requirements."""
    found: set[str] = set()
    left = [Requirement(name) for name in names]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if name in found:
            continue
        found.add(name)
        extras = ["", *one.extras]
        for needed in map(Requirement, requires(name) or ()):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(needed)
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="importlib.metadata finds few of the modules of packages")
@pytest.mark.slow
def test_the_gpu_tests_and_the_package_need_few_packages() -> None:
    # transformers needs rich only for its command line
    there = {*with_requirements(INSTALLED), "lightning-fp8"} - {"rich"}
    packages_of = {module: {*map(canonicalize_name, found)} for module, found in packages_distributions().items()}
    hidden = {
        "modules": [module for module, packages in packages_of.items() if not packages & there],
        "packages": sorted(set().union(*packages_of.values()) - there),
    }
    assert {"playwright", "torchdata", "x_transformers", "jsonargparse", "matplotlib"} <= {*hidden["modules"]}
    files = [*(ROOT / "tests").rglob("test_*.py")]
    expected = {file.name for file in files if re.search(r"pytest\.mark\.cuda\n|, DEVICES\)", file.read_text())}
    # and one that imports a hidden package
    chosen = [str(file) for file in files if file.name in {*expected, "test_report_page.py"}]
    program = [sys.executable, "-c", COLLECT, json.dumps(hidden), *chosen]
    environment = without_options() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert {"test_cuda.py", "test_cuda_gemm.py", "test_harness.py", "test_ddp.py"} <= expected
    assert {*re.findall(r"^tests/(?:\w+/)?(\w+\.py)::", ran.stdout, re.MULTILINE)} == expected
