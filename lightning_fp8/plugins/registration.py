"""The one place that patches Lightning: where a precision string or a plugin becomes the plugin of a strategy.

Lightning has no registry for precisions. This module replaces, and :func:`unregister` restores exactly:

- ``_check_and_init_precision`` of the Trainer's and of Fabric's connector, which creates the plugin;
- ``_PRECISION_INPUT_STR`` in Fabric's connector, the strings that both accept (and list when they refuse another one);
- the annotation of ``Trainer(precision=...)``, by which the Lightning CLI checks a configuration;
- ``Strategy.setup_precision_plugin`` of the Trainer, and ``setup``, ``setup_module``, ``save`` and ``load`` of Fabric:
  in addition they warn where the scales of a converted model would not be updated or would be lost. The classes are
  patched rather than plugins, which are copied and pickled and may be the user's own. ``load`` also restores a
  ``ScalingState`` from a sharded checkpoint, as it does from any other.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import lightning
import lightning.fabric.connector as fabric_connector
import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector
from lightning.fabric import Fabric
from lightning.fabric import strategies as fabric_strategies
from lightning.pytorch import Trainer
from lightning.pytorch import strategies as trainer_strategies
from torch import nn

from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.fabric import FABRIC_FSDP_PLUGINS, FABRIC_PLUGINS
from lightning_fp8.plugins.notices import (
    warn_of_fabric,
    warn_of_trainer,
    warn_of_unloaded_scales,
    warn_of_unsaved_scales,
)
from lightning_fp8.plugins.settings import PRECISIONS
from lightning_fp8.plugins.trainer import FSDP_PLUGINS, PLUGINS
from lightning_fp8.scaling.state import ScalingState

_METHOD = "_check_and_init_precision"
_STRINGS = "_PRECISION_INPUT_STR"


def _classes(module: Any, *names: str) -> tuple[type, ...]:
    # a Lightning version without one of them cannot use it
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


class _FrontEnd(NamedTuple):
    """The names that differ between the Trainer and Fabric, and our plugins for each."""

    name: str
    connector: tuple[Any, str]
    string_attribute: str
    plugin_attribute: str
    foreign_strategies: tuple[type, ...]
    fsdp_strategy: type
    plugins: Mapping[str, type[Any]]
    fsdp_plugins: Mapping[str, type[Any]]


_FRONT_ENDS = (
    _FrontEnd(
        "Trainer",
        (trainer_connector, "_AcceleratorConnector"),
        "_precision_flag",
        "_precision_plugin_flag",
        _classes(trainer_strategies, "SingleDeviceXLAStrategy", "XLAStrategy", "DeepSpeedStrategy"),
        trainer_strategies.FSDPStrategy,
        PLUGINS,
        FSDP_PLUGINS,
    ),
    _FrontEnd(
        "Fabric",
        (fabric_connector, "_Connector"),
        "_precision_input",
        "_precision_instance",
        _classes(fabric_strategies, "SingleDeviceXLAStrategy", "XLAStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy"),
        fabric_strategies.FSDPStrategy,
        FABRIC_PLUGINS,
        FABRIC_FSDP_PLUGINS,
    ),
)


def _saying_at_setup(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def setup_precision_plugin(strategy: trainer_strategies.Strategy) -> None:
        # by now the plugin has converted the model
        original(strategy)
        if strategy.lightning_module is not None:
            warn_of_trainer(strategy.lightning_module, strategy.precision_plugin)

    return setup_precision_plugin


def _saying_at_fabric_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup(fabric: Fabric, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = original(fabric, module, *args, **kwargs)
        warn_of_fabric(module, fabric.strategy.precision)
        return made

    return setup


def _saying_at_save(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(fabric: Fabric, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        warn_of_unsaved_scales(state)
        original(fabric, path, state, *args, **kwargs)

    return save


def _saying_at_load(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def load(fabric: Fabric, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        asked = dict(state) if isinstance(state, Mapping) else {}
        rest = original(fabric, path, state, *args, **kwargs)
        for key, value in asked.items():
            # Strategies that load sharded checkpoints replace an object that is not a model with what was saved.
            if isinstance(value, ScalingState) and state[key] is not value:
                value.load_state_dict(state[key])
                state[key] = value
        warn_of_unloaded_scales(state, rest)
        return rest

    return load


# class, method, and the function that wraps the original method
_METHODS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (trainer_strategies.Strategy, "setup_precision_plugin", _saying_at_setup),
    (Fabric, "setup", _saying_at_fabric_setup),
    (Fabric, "setup_module", _saying_at_fabric_setup),
    (Fabric, "save", _saying_at_save),
    (Fabric, "load", _saying_at_load),
)

# the calls that restore Lightning, newest last; empty when nothing is registered
_undo: list[Callable[[], None]] = []
# the precision strings for which our plugins are made
_ours: set[str] = set()


def register(bf16: bool | None = None) -> None:
    """Register ``"fp8-delayed"`` with Lightning, and make ``"bf16-mixed"`` and ``"bf16-true"`` ours. Idempotent.

    Importing the package calls it.

    Args:
        bf16: whether the bf16 strings make this package's plugins. With False they make Lightning's own, even if an
            earlier call replaced them; a ``Bf16MixedPrecision`` passed as a plugin still works. With None: False if
            ``LIGHTNING_FP8_REPLACE_BF16=0`` is in the environment, else True.

    Raises:
        RuntimeError: if the installed Lightning lacks a place that this patches; nothing is changed then.
        ValueError: if ``LIGHTNING_FP8_REPLACE_BF16`` is needed and neither ``0`` nor ``1``; nothing is changed then.
    """
    replaces = _replaces_bf16() if bf16 is None else bf16
    if not _undo:
        _patch()
    _ours.clear()
    _ours.update(PRECISIONS if replaces else ["fp8-delayed"])


def _replaces_bf16() -> bool:
    value = os.environ.get("LIGHTNING_FP8_REPLACE_BF16", "1")
    if value not in ("0", "1"):
        raise ValueError(
            "LIGHTNING_FP8_REPLACE_BF16 must be 1, to replace Lightning's bf16-mixed and bf16-true plugins, or 0, to"
            f" leave them alone; got {value!r}."
        )
    return value == "1"


def _patch() -> None:
    missing = _missing_places()
    if missing:
        raise RuntimeError(
            f"lightning {lightning.__version__} has no {', no '.join(missing)}, so the precision strings of"
            " lightning_fp8 cannot be registered. Pass the plugin instead:"
            " `Trainer(plugins=lightning_fp8.Fp8Precision())`; and please report this version."
        )
    for front_end in _FRONT_ENDS:
        connector = getattr(*front_end.connector)
        _replace(connector, _METHOD, _plugin_maker(front_end, getattr(connector, _METHOD)))
    strings = Literal[(*get_args(getattr(fabric_connector, _STRINGS)), "fp8-delayed")]  # type: ignore[valid-type]
    _replace(fabric_connector, _STRINGS, strings)
    for owner, name, make in _METHODS:
        _replace(owner, name, make(getattr(owner, name)))
    annotations = inspect.unwrap(Trainer.__init__).__annotations__
    before = annotations["precision"]
    annotations["precision"] = before | Literal["fp8-delayed"]
    _undo.append(lambda: annotations.update(precision=before))


def unregister() -> None:
    """Put Lightning back exactly as it was."""
    while _undo:
        _undo.pop()()


def registered() -> frozenset[str]:
    """The precision strings that make this package's plugins now."""
    return frozenset(_ours if _undo else ())


def _missing_places() -> list[str]:
    missing = []
    for front_end in _FRONT_ENDS:
        module, name = front_end.connector
        if not callable(getattr(getattr(module, name, None), _METHOD, None)):
            missing.append(f"`{module.__name__}.{name}.{_METHOD}`")
    if not get_args(getattr(fabric_connector, _STRINGS, None)):
        missing.append(f"`{fabric_connector.__name__}.{_STRINGS}`")
    if "precision" not in inspect.unwrap(Trainer.__init__).__annotations__:
        missing.append("annotated `precision` argument of `Trainer`")
    for owner, name, _ in _METHODS:
        if not callable(getattr(owner, name, None)):
            missing.append(f"`{owner.__module__}.{owner.__name__}.{name}`")
    return missing


def _replace(owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, before))


def _plugin_maker(front_end: _FrontEnd, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _check_and_init_precision(connector: Any) -> Any:
        strategy = connector.strategy
        plugin, string = getattr(connector, front_end.plugin_attribute), getattr(connector, front_end.string_attribute)
        if isinstance(plugin, PrecisionCore):
            string = plugin.precision
        elif plugin is not None or string not in _ours:
            return original(connector)
        if isinstance(strategy, front_end.foreign_strategies):
            if string == "fp8-delayed" or plugin is not None:
                raise ValueError(
                    f"`precision={string!r}` by lightning_fp8 does not run under {type(strategy).__name__}, which"
                    " has its own precision. Use a single-device, DDP, FSDP or ModelParallel strategy, or, with this"
                    f' one, `{front_end.name}(precision="bf16-mixed")`.'
                )
            return original(connector)
        is_fsdp = isinstance(strategy, front_end.fsdp_strategy)
        wanted = (front_end.fsdp_plugins if is_fsdp else front_end.plugins)[string]
        if plugin is None:
            return wanted()
        # A plugin made for the other front end, or for another strategy: only its settings are used.
        return plugin if isinstance(plugin, wanted) else wanted(**plugin.settings)

    return _check_and_init_precision
