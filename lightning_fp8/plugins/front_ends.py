"""The front ends of Lightning that take a precision: the Trainer and Fabric, each under both of its names.

Lightning is published twice, from one source: as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``.
The two have different classes. This module lists what :mod:`lightning_fp8.plugins.registration` replaces, once for both
names. What a replaced function needs of this package is imported when it is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from lightning_fp8.plugins.settings import FP8_PRECISIONS, suggestion

# a module of the package, the path of a value in it, and a function from the old value to the new one
_Place = tuple[str, str, Callable[[Any], Any]]

# the precision strings that select our plugins; `register` sets them
ours: set[str] = set()


class FrontEnd(NamedTuple):
    """The names that differ between the Trainer and Fabric.

    Attributes:
        name: name of its class.
        package: the package that has the class.
        connector: module and class of the connector, which creates the plugin.
        string_attribute: attribute of the connector with the precision string that the user passed.
        plugin_attribute: attribute of the connector with the plugin that the user passed.
        foreign_strategies: classes of strategies that have their own precision.
        further_places: what is replaced besides the connector's methods.
    """

    name: str
    package: str
    connector: tuple[str, str]
    string_attribute: str
    plugin_attribute: str
    foreign_strategies: tuple[str, ...]
    further_places: tuple[_Place, ...]

    def missing(self) -> list[str]:
        """The places that this version of the package lacks."""
        return [f"`{self.package}.{path}`" for path, old, *_ in self._found() if not old]

    def replacements(self) -> list[tuple[Any, str, Any, Any]]:
        """Owner, name, old value and new value of each place; none may be missing."""
        return [(owner, name, _without_fp8(old), make(old)) for _, old, owner, name, make in self._found()]

    def _found(self) -> Iterator[tuple[str, Any, Any, str, Callable[[Any], Any]]]:
        module, connector = self.connector
        places: tuple[_Place, ...] = (
            (module, f"{connector}._check_and_init_precision", functools.partial(_plugin_maker, self)),
            (module, f"{connector}._check_config_and_set_final_flags", _suggesting),
            *self.further_places,
        )
        for module, path, make in places:
            *owners, name = path.split(".")
            owner: Any = _module(f"{self.package}.{module}".removesuffix("."))
            for part in owners:
                # the annotations belong to the function inside its decorators
                owner = getattr(inspect.unwrap(owner), part, None)
            old = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            yield f"{module}.{path}".removeprefix("."), old, owner, name, make


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


def _plugin_maker(front_end: FrontEnd, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    strategies = import_module(f"{front_end.package}.strategies")
    # a Lightning version without one of them cannot use it
    foreign = tuple(getattr(strategies, name) for name in front_end.foreign_strategies if hasattr(strategies, name))

    def _check_and_init_precision(connector: Any) -> Any:
        from lightning_fp8.plugins.core import PrecisionCore
        from lightning_fp8.plugins.fabric import FabricPrecision
        from lightning_fp8.plugins.trainer import plugin_of

        strategy = connector.strategy
        plugin, string = getattr(connector, front_end.plugin_attribute), getattr(connector, front_end.string_attribute)
        if isinstance(plugin, PrecisionCore):
            string = plugin.precision
        elif plugin is not None or string not in ours:
            lightnings = original(connector)
            # on a CPU, Lightning itself has replaced "16-mixed"
            string = getattr(connector, front_end.string_attribute)
            if plugin is not None or string not in ours:
                return lightnings
        if isinstance(strategy, foreign):
            if string in FP8_PRECISIONS or plugin is not None:
                raise ValueError(
                    f"`precision={string!r}` by lightning_fp8 does not run under {type(strategy).__name__}, which"
                    " has its own precision. Use a single-device, DDP, FSDP or ModelParallel strategy, or, with this"
                    f' one, `{front_end.name}(precision="bf16-mixed")`.'
                )
            return original(connector)
        plugin = plugin_of(string) if plugin is None else plugin
        if isinstance(strategy, strategies.FSDPStrategy):
            plugin.check_fsdp()
        return plugin if front_end.name == "Trainer" else FabricPrecision(plugin)

    return _check_and_init_precision


def _suggesting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _check_config_and_set_final_flags(connector: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(connector, *args, **kwargs)
        except ValueError as error:
            precision = inspect.signature(original).bind(connector, *args, **kwargs).arguments["precision"]
            # leave an error about another argument as it is
            if not str(error).startswith(f"Precision {precision!r}"):
                raise
            raise ValueError(f"{error}{suggestion(precision)}") from None

    return _check_config_and_set_final_flags


def _with_fp8(strings: Any) -> Any:
    return Literal[get_args(strings) + FP8_PRECISIONS]


def _or_fp8(annotation: Any) -> Any:
    return annotation | Literal[FP8_PRECISIONS]


def _without_fp8(old: Any) -> Any:
    """A type as Lightning wrote it, even if a module imported later built it from a type that had been replaced."""
    kind, parts = get_origin(old), get_args(old)
    left = tuple(part for part in parts if part not in (*FP8_PRECISIONS, Literal[FP8_PRECISIONS]))
    return old if left == parts else (Literal if kind is Literal else Union)[left]


def _annotations(module: str) -> tuple[_Place, ...]:
    """Lightning's two types for a precision, which packages use in annotations, in a module that has both."""
    return (module, "_PRECISION_INPUT", _or_fp8), (module, "_PRECISION_INPUT_STR", _with_fp8)


def _then_warn(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a function of Lightning, and then the one of ``notices`` with its result and its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            from lightning_fp8.plugins import notices

            result = original(*args, **kwargs)
            getattr(notices, name)(result, *args, **kwargs)
            return result

        return replaced

    return make


def _saving_scales(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(fabric: Any, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        from lightning_fp8.plugins.scales import with_scales

        original(fabric, path, with_scales(state), *args, **kwargs)

    return save


def _loading_scales(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def load(fabric: Any, path: Any, state: Any = None, strict: bool = True, **kwargs: Any) -> dict[str, Any]:
        from lightning_fp8.plugins.scales import take_scales

        request = dict(state) if isinstance(state, Mapping) else {}
        rest = original(fabric, path, state, strict, **kwargs)
        take_scales(request, state, rest)
        return rest

    return load


_TRAINER = FrontEnd(
    "Trainer",
    "lightning.pytorch",
    ("trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    "_precision_flag",
    "_precision_plugin_flag",
    ("SingleDeviceXLAStrategy", "XLAStrategy", "DeepSpeedStrategy"),
    (
        ("", "Trainer.__init__.__annotations__.precision", _or_fp8),
        *_annotations("trainer.trainer"),
        *_annotations("trainer.connectors.accelerator_connector"),
        ("strategies", "Strategy.setup_precision_plugin", _then_warn("warn_of_trainer")),
    ),
)
_FABRIC = FrontEnd(
    "Fabric",
    "lightning.fabric",
    ("connector", "_Connector"),
    "_precision_input",
    "_precision_instance",
    ("SingleDeviceXLAStrategy", "XLAStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy"),
    (
        *_annotations("connector"),
        *_annotations("plugins.precision.precision"),
        ("fabric", "_PRECISION_INPUT", _or_fp8),
        ("", "Fabric.setup", _then_warn("warn_of_fabric")),
        ("", "Fabric.setup_module", _then_warn("warn_of_fabric")),
        ("", "Fabric.save", _saving_scales),
        ("", "Fabric.load", _loading_scales),
    ),
)
FRONT_ENDS = (_FABRIC, _TRAINER)
# the same under the other name
MIRRORS = (_FABRIC._replace(package="lightning_fabric"), _TRAINER._replace(package="pytorch_lightning"))
