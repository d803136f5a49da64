"""What the user is told, once: evaluation without scales, scales that nobody updates, the first inf or NaN."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import small_mlp
from lit import Lit, loader, trainer_options
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DelayedScaling, ScalingState, convert, load_scales, scaling_state
