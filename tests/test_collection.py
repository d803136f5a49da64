"""The tests for a GPU import nothing that such a machine may lack: torch, Lightning, CuPy, NumPy, transformers."""

from __future__ import annotations

import os
import re

import pytest
from repository import ROOT
from warm import run_warm

LACKING = (
    *("accelerate", "bitsandbytes", "compressed_tensors", "hypothesis", "jsonargparse", "matplotlib", "mkdocs"),
    *("ml_dtypes", "mlflow", "peft", "playwright", "plotly", "pytorch_lightning", "rich", "schedulefree", "scipy"),
    *("sklearn", "tensorboard", "torchao", "torchdata", "wandb", "x_transformers"),
)
# for a process that cannot find these or their metadata, and seems to have a GPU
COLLECT = f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {LACKING!r} else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = PathFinder.find_distributions(*context)
        return (one for one in found if one.name.lower().replace("-", "_") not in {LACKING!r})

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
# Lightning has imported some of them
for name in [*sys.modules]:
    if name.partition(".")[0] in {LACKING!r}:
        del sys.modules[name]
import pytest, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
sys.exit(pytest.main(["--collect-only", "-q", "-m", "cuda", "-p", "no:cacheprovider", "--assert=plain", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_gpu_tests_and_the_package_need_few_packages() -> None:
    files = [*(ROOT / "tests").rglob("test_*.py")]
    expected = {file.name for file in files if re.search(r"pytest\.mark\.cuda\n|, DEVICES\)", file.read_text())}
    # and one that imports what is lacking
    chosen = [str(file) for file in files if file.name in {*expected, "test_report_page.py"}]
    # without a user's options, which would change the output
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ran = run_warm("-c", COLLECT, *chosen, env=environment)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert {"test_cuda.py", "test_cuda_gemm.py", "test_harness.py"} <= expected
    assert {*re.findall(r"^tests/(?:\w+/)?(\w+\.py)::", ran.stdout, re.MULTILINE)} == expected
