"""Refuses a torch older than pyproject.toml allows, before an import or a product fails for lack of a feature."""

import torch

OLDEST_TORCH = "2.11"

if torch.__version__ < OLDEST_TORCH:
    raise ImportError(
        f"lightning_fp8 needs torch {OLDEST_TORCH} or newer, and this is torch {torch.__version__}. "
        "Run `pip install --upgrade torch`."
    )
