"""The only place that patches Lightning, so that its precision strings can select this package's plugins.

Lightning has no registry for precisions. This module replaces, and :func:`unregister` restores exactly:

- ``_check_and_init_precision`` of the Trainer's and of Fabric's connector, which creates the plugin;
- ``_check_config_and_set_final_flags`` of both, to suggest a string in its error;
- ``_PRECISION_INPUT_STR`` in Fabric's connector: the strings that both accept, and list in their error. The same name,
  and ``_PRECISION_INPUT``, wherever else Lightning has them: other packages check their own arguments by these types;
- the annotation of ``Trainer(precision=...)``, by which the Lightning CLI checks a configuration;
- ``Strategy.setup_precision_plugin`` of the Trainer, ``setup`` and ``setup_module`` of Fabric: in addition they warn
  where the scales of a converted model would not be updated. The classes are patched rather than plugins, because
  plugins are copied and pickled and may be the user's own;
- ``save`` and ``load`` of Fabric, whose checkpoints do not hold the state of a plugin: they add and load the scales.

The same is done for ``pytorch_lightning`` and ``lightning_fabric``, Lightning's other names, when they are imported.
Our plugins and callbacks then also get Lightning's base classes of that name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from lightning_fp8.plugins.front_ends import FRONT_ENDS, MIRRORS, FrontEnd, ours
from lightning_fp8.plugins.settings import FP8_PRECISIONS, PRECISIONS
from lightning_fp8.runtime.after_import import after_import

# the calls that restore Lightning, newest last; empty when nothing is registered
_undo: list[Callable[[], None]] = []


def register(bf16: bool | None = None) -> None:
    """Register the ``"fp8-"`` precisions with Lightning, and replace its bf16 plugins. Idempotent.

    Importing the package calls it.

    Args:
        bf16: whether the bf16 strings select this package's plugins. With False they select Lightning's own, even if an
            earlier call replaced them; a ``Bf16MixedPrecision`` passed as a plugin still works. With None: False if
            ``LIGHTNING_FP8_REPLACE_BF16=0`` is in the environment, else True.

    Raises:
        RuntimeError: if the installed Lightning lacks a place that this patches; nothing is changed then.
        ValueError: if ``LIGHTNING_FP8_REPLACE_BF16`` is needed and neither ``0`` nor ``1``; nothing is changed then.
    """
    replaces = _replaces_bf16() if bf16 is None else bf16
    if not _undo:
        _patch()
    ours.clear()
    ours.update(PRECISIONS if replaces else FP8_PRECISIONS)


def _replaces_bf16() -> bool:
    value = os.environ.get("LIGHTNING_FP8_REPLACE_BF16", "1")
    if value not in ("0", "1"):
        raise ValueError(
            "LIGHTNING_FP8_REPLACE_BF16 must be 1, to replace Lightning's bf16-mixed and bf16-true plugins, or 0, to"
            f" leave them alone; got {value!r}."
        )
    return value == "1"


def _patch() -> None:
    missing = [place for front_end in FRONT_ENDS for place in front_end.missing()]
    if missing:
        raise RuntimeError(
            f"lightning {lightning.__version__} has no {', no '.join(missing)}, so the precision strings of"
            " lightning_fp8 cannot be registered. Pass the plugin instead:"
            " `Trainer(plugins=lightning_fp8.Fp8Precision())`; and please report this version."
        )
    for front_end in FRONT_ENDS:
        _replace(front_end)
    for mirror, front_end in zip(MIRRORS, FRONT_ENDS, strict=True):
        # Importing it takes a second, so it is patched only once the user has imported it.
        _undo.append(after_import(mirror.package, partial(_patch_mirror, mirror, front_end.package)))


def _patch_mirror(mirror: FrontEnd, package: str) -> None:
    """Patch a front end under Lightning's other name, after its import; ``package`` is the name that we use."""
    from lightning_fp8.plugins.fabric import FabricPrecision
    from lightning_fp8.plugins.trainer import PLUGINS

    done = len(_undo)
    try:
        missing = mirror.missing()
        if missing:
            raise LookupError(f"it has no {', no '.join(missing)}")
        _replace(mirror)
        _share_bases({*PLUGINS.values(), FabricPrecision}, package, mirror.package)
        # a callback that is imported later needs them too
        share = partial(_share_bases, _our_subclasses(Callback), package, mirror.package)
        _undo.append(after_import("lightning_fp8.callbacks", share))
    # any error, which would otherwise break the user's own `import pytorch_lightning`
    except Exception as error:
        _undo_to(done)
        version = getattr(import_module(mirror.package), "__version__", "")
        warnings.warn(
            f"lightning_fp8 does not work with {mirror.package} {version}: {error}. Import `{package}` in place of"
            f" `{mirror.package}`.",
            stacklevel=2,
        )


def _share_bases(kinds: Iterable[type], package: str, mirror: str) -> None:
    """Make plugins or callbacks subclasses of the other package's classes too, because its Trainer, strategies and
    command line check for these. The bases of the package that we use come first, so the others are never called.
    """
    for kind in kinds:
        bases = [base for base in kind.__mro__ if base.__module__.startswith(f"{package}.")]
        if issubclass(kind, Callback):
            # only the checked base: constructors of further bases would be called with wrong arguments
            bases = [Callback] if bases else []
        # skip classes that another of these derives from
        bases = [base for base in bases if not any(base in other.__mro__[1:] for other in bases)]
        modules = [import_module(mirror + base.__module__.removeprefix(package)) for base in bases]
        counterparts = [getattr(module, base.__name__) for module, base in zip(modules, bases, strict=True)]
        counterparts = [other for other in counterparts if not issubclass(kind, other)]
        if counterparts:
            _undo.append(partial(setattr, kind, "__bases__", kind.__bases__))
            mine = [base for base in kind.__bases__ if not base.__module__.startswith("lightning_fabric.")]
            # the others have to come before their own base class
            kind.__bases__ = (*mine, *counterparts, *(base for base in kind.__bases__ if base not in mine))


def _our_subclasses(base: type) -> Iterator[type]:
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        if kind.__module__.startswith("lightning_fp8."):
            yield kind
        yield from _our_subclasses(kind)


def unregister() -> None:
    """Put Lightning back exactly as it was."""
    _undo_to(0)


def _undo_to(length: int) -> None:
    while len(_undo) > length:
        _undo.pop()()


def registered() -> frozenset[str]:
    """The precision strings that currently select this package's plugins."""
    return frozenset(ours if _undo else ())


def _replace(front_end: FrontEnd) -> None:
    for owner, name, old, new in front_end.replacements():
        _set(owner, name, new)
        _undo.append(partial(_set, owner, name, old))


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
