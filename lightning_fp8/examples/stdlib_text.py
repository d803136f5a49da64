"""Real text that comes with Python: the source of its standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class StdlibText(LightningDataModule):
    """Bytes of the modules of Python's standard library: batches ``[batch_size, context + 1] uint8``.

    Every tenth file, in alphabetical order, is held out for validation.

    Python 3.11's top-level modules have 4.7 million bytes. With its packages there are 31 million, or 11 million where
    they come without their tests, as from Debian. A model of 124 million parameters reads 33 million bytes in 2,000
    steps of 16 windows of 1,024 bytes: the text about once, or three times.

    Args:
        context: input length of the model, in bytes; a window has one more, the last target.
        batch_size: windows per batch.
        val_windows: windows in the validation set, taken evenly from the held-out files.
        max_bytes: read at most this much training text.
        packages: also read the modules inside packages, not only top-level modules.

    Raises:
        RuntimeError: if Python came without the source of its library.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 32,
        val_windows: int = 512,
        max_bytes: int = 8_000_000,
        packages: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.batch_size = batch_size
        self.val_windows = val_windows
        self.max_bytes = max_bytes
        self.packages = packages

    def setup(self, stage: str) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(_files(library) if self.packages else library.glob("*.py"))
        if len(files) < 20:
            raise RuntimeError(f"Found {len(files)} modules of the standard library in {library}.")
        held_out = self._windows(_read(files[9::10]))
        self.val_set = held_out[:: max(1, len(held_out) // self.val_windows)][: self.val_windows]
        training = [file for position, file in enumerate(files) if position % 10 != 9]
        self.train_set = self._windows(_read(training, self.max_bytes))

    def _windows(self, text: Tensor) -> Tensor:
        """Consecutive windows ``[windows, context + 1]`` of a text ``[bytes]``, without its incomplete end."""
        length = self.context + 1
        return text[: len(text) // length * length].view(-1, length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(cast("Dataset[Tensor]", self.train_set), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(cast("Dataset[Tensor]", self.val_set), self.batch_size)


def _files(library: Path) -> Iterator[Path]:
    yield from library.glob("*.py")
    for folder in library.iterdir():
        # installed packages are not part of the library
        if folder.is_dir() and folder.name not in ("site-packages", "dist-packages"):
            yield from folder.rglob("*.py")


def _read(files: list[Path], most: int | None = None) -> Tensor:
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if most is not None and len(text) >= most:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:most]
