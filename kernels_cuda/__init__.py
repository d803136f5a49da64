"""The CUDA half of the operators: ``.cu`` sources, compiled at run time. Knows torch and CuPy, nothing of Lightning.

Nothing is launched from here yet: on a GPU the operators run on torch's own kernels and ``torch._scaled_mm``.
"""

from __future__ import annotations

from pathlib import Path


def source(kernel: str) -> str:
    """The CUDA C++ source of a kernel family, by the name of its file.

    Raises:
        ValueError: if there is none of that name; the message lists those there are.
    """
    folder = Path(__file__).parent
    path = folder / f"{kernel}.cu"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in folder.glob("*.cu")))
        raise ValueError(f"There is no kernel source {kernel!r}; there are: {known}.")
    return path.read_text()
