"""Files that a callback leaves beside a run's logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


def log_folder(trainer: Trainer) -> Path | None:
    """The folder of the run's logs; None without a logger, with one that has no folder, and for a remote one.

    It asks the other processes, so all of them have to call it.
    """
    # without a logger `log_dir` would be the folder that the program runs in
    if not trainer.loggers:
        return None
    folder = trainer.log_dir
    return None if folder is None or "://" in str(folder) else Path(folder)


def write_json(path: Path, content: Any) -> None:
    """Write a file that a reader sees whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
