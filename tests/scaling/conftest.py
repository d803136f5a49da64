from __future__ import annotations

import pytest


@pytest.fixture(params=["reference", "kernels"])
def half(request: pytest.FixtureRequest) -> str:
    """Which half of the operators runs, on the CPU in any case."""
    if request.param == "kernels":
        request.getfixturevalue("cuda_half")
    return str(request.param)
