"""The CUDA half of the operators: ``.cu`` sources, compiled at run time. Knows torch and CuPy, nothing of Lightning."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def source(kernel: str) -> str:
    """The CUDA C++ source of a kernel family, by the name of its file.

    Raises:
        ValueError: if there is none of that name; the message lists the existing ones.
    """
    path = _FOLDER / f"{kernel}.cu"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.cu")))
        raise ValueError(f"There is no kernel source {kernel!r}; there are: {names}.")
    return path.read_text()
