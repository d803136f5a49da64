"""A callback that trains in FP8 with ``transformers.Trainer``."""

from __future__ import annotations

import base64
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_fp8.conversion.convert import carry_out_for_run, scaling_state
from lightning_fp8.conversion.one_state import state_now
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.conversion.schedule import Schedule
from lightning_fp8.conversion.settings import Overrides, checked_settings
from lightning_fp8.modules.base import on_sharded_weights
from lightning_fp8.modules.paths import as_patterns
from lightning_fp8.scaling.config import FrozenWeights
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.recipe import Recipe, as_recipe

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as error:
    raise ImportError("Fp8Callback is for `transformers.Trainer`: `pip install 'transformers[torch]'`.") from error
if not hasattr(TrainerCallback, "on_pre_optimizer_step"):
    # without this event nothing would update the scales
    raise ImportError("Fp8Callback needs a newer transformers: `pip install --upgrade 'transformers[torch]'`.")


# the attribute of the callback that holds the scales as text
SCALES = "fp8_scales"
# shown by default, unlike what transformers logs as information
_LOG = logging.getLogger("lightning_fp8")


class Fp8Callback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Trains in FP8 with ``transformers.Trainer``: ``Trainer(model, args, callbacks=[Fp8Callback()])``.

    It converts the model when the Trainer is created, before it is wrapped or compiled, and updates the scales once per
    optimizer step, after backward. Each checkpoint holds the scales, in its ``trainer_state.json``, and a resumed run
    loads them with the weights. What does not run in FP8 has the dtypes that the Trainer's arguments ask for:
    ``bf16=True`` is usual.

    Args:
        recipe: as in :func:`lightning_fp8.convert`, or a mapping of its fields.
        ignore_modules: as in ``convert``. A model that is converted already keeps its layers, unless this argument,
            ``min_features`` or ``overrides`` is given.
        min_features: as in ``convert``.
        frozen_weights: as in ``convert``.
        overrides: as in ``convert``.
        schedule: as in :class:`lightning_fp8.PrecisionSchedule`; each switch is printed by the main process.

    Raises:
        ImportError: at import, without transformers.
        ValueError: for an invalid argument; in the Trainer, as in :func:`lightning_fp8.convert`, and for DeepSpeed,
            ``nn.DataParallel``, ``mixed_precision="fp8"``, and a checkpoint with the scales of another model.
        RuntimeError: in training, if anything else updates the scales too, such as a second ``Fp8Callback``.
    """

    def __init__(
        self,
        recipe: Recipe | str | Mapping[str, Any] | None = None,
        ignore_modules: Sequence[str] = (),
        min_features: int | None = None,
        frozen_weights: FrozenWeights | None = None,
        overrides: Overrides | None = None,
        schedule: Mapping[Any, Any] | None = None,
    ) -> None:
        self.ignore_modules = as_patterns(ignore_modules, "ignore_modules")
        self.settings = checked_settings(
            recipe=as_recipe(recipe),
            min_features=min_features,
            frozen_weights=frozen_weights,
            overrides=overrides,
        )
        self._schedule = None if schedule is None else Schedule(schedule)
        self._model: nn.Module | None = None
        # number of updates of the scales before this optimizer step
        self._updates = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the arguments of this callback, and the scales, if there are any."""
        args = {**self.settings, "ignore_modules": list(self.ignore_modules)}
        if "recipe" in args:
            args["recipe"] = args["recipe"].as_dict()
        if self._schedule is not None:
            args["schedule"] = self._schedule.entries
        attributes = {} if self._model is None else {SCALES: _as_text(scaling_state(self._model))}
        return {"args": args, "attributes": attributes}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert the model."""
        _refuse(args)
        self._convert(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert a model that the Trainer has created since, and load the scales of the checkpoint that it resumes."""
        scaling = self._convert(kwargs["model"])
        on_sharded_weights(kwargs["model"])
        # drop what was recorded in a step that an earlier call of `train` abandoned: its gradients are dropped too
        scaling.discard()
        self._updates = scaling.updates
        # a schedule belongs to one run
        scaling.end_schedule()
        if self._schedule is not None:
            self._schedule.start(kwargs["model"], state.max_steps)
        # the Trainer requires an entry, which a checkpoint of a run without this callback lacks
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {})
        if state.global_step > 0:
            _load(scaling, _scales_of_callback(saved), f"The checkpoint of step {state.global_step}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the model run as the schedule says."""
        said = "" if self._schedule is None else self._schedule.apply(state.global_step)
        if said and state.is_world_process_zero:
            _LOG.warning(said)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the scales."""
        scaling = None if self._model is None else state_now(self._model)
        if scaling is None or scaling.updates != self._updates:
            raise RuntimeError(
                "Fp8Callback: the scales of this model have been updated by something else too, but each optimizer step"
                " has one update. Remove the second `Fp8Callback`, or the call of `scaling_state(model).update()`."
            )
        scaling.update()
        self._updates = scaling.updates

    def _convert(self, model: nn.Module) -> ScalingState:
        self._model = model
        return carry_out_for_run(conversion_plan(model, self.ignore_modules, **self.settings))


def _as_text(state: ScalingState) -> str:
    """A scaling state as one string, for JSON; exact, and shorter than decimal numbers."""
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _scales_of_callback(saved: Any) -> Any:
    """The scales that :func:`_as_text` wrote into the state of a ``transformers.Trainer`` callback; None if absent.

    Raises:
        ValueError: if the text is damaged.
    """
    attributes = saved.get("attributes") if isinstance(saved, Mapping) else None
    if not isinstance(attributes, Mapping) or SCALES not in attributes:
        return None
    try:
        content = io.BytesIO(base64.b64decode(attributes[SCALES], validate=True))
        scales = torch.load(content, map_location="cpu", weights_only=True)
    # of many kinds, as for a file
    except Exception as error:
        raise ValueError(f"{SCALES!r} in the state of a callback is damaged: {type(error).__name__}.") from None
    return scales


def _load(scaling: ScalingState, scales: Any, checkpoint: str) -> None:
    """Load the scales of a checkpoint whose weights the Trainer has loaded."""
    if scales is not None:
        scaling.load_state_dict(scales)
        return
    warnings.warn(
        f"Fp8Callback: {checkpoint} has weights but no FP8 scales. They start anew, so the first steps differ from"
        " those of an uninterrupted run. Checkpoints have them if `Fp8Callback` was among the callbacks of the run that"
        " saved them.",
        stacklevel=2,
    )


def _refuse(args: Any) -> None:
    """ValueError for what cannot run with this callback."""
    if args.mixed_precision == "fp8":
        raise ValueError(
            'Fp8Callback: accelerate\'s own `mixed_precision="fp8"` would convert the layers a second time. Choose'
            ' "bf16" (`bf16=True`), or leave out this callback.'
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"Fp8Callback does not run under `nn.DataParallel`, which the Trainer uses for {args.n_gpu} GPUs in one"
            " process. Start one process for each GPU, with `torchrun` or `accelerate launch`."
        )
    if args.deepspeed_plugin is not None:
        raise ValueError(
            "Fp8Callback does not run under DeepSpeed, which has its own optimizer and precision. Use DDP, or leave out"
            " this callback."
        )
