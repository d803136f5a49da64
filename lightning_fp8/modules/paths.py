"""Module paths, and the patterns by which users choose modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_fp8.runtime.did_you_mean import closest

# Wrappers add these to a module's path; removing them keeps names the same with and without the wrapper.
_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


# added to the error about something that is not a pattern, such as a class
_INSTEAD = (
    "A pattern is a module's path as in `model.named_modules()`, where `*` stands for anything: 'head', '*.norm'."
    " For all modules of a class, pass `[path for path, module in model.named_modules() if isinstance(module, Class)]`."
)


def plain_path(path: str) -> str:
    """A module's path without the segments that wrappers add."""
    return ".".join(segment for segment in path.split(".") if segment not in _WRAPPER_SEGMENTS)


def numbered(path: str) -> str:
    """A path with ``*`` for each number in it, so that the layers of a stack have the same path.

    >>> numbered("layers.11.mlp.up")
    'layers.*.mlp.up'
    """
    return ".".join("*" if segment.isdecimal() else segment for segment in path.split("."))


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()`` by plain paths, parents before children."""
    for path, layer in module.named_modules():
        yield plain_path(path), layer


def without_wrappers(module: nn.Module) -> nn.Module:
    """The model inside wrappers that add nothing to its path, such as the wrapper of ``torch.compile``."""
    return [layer for path, layer in named_modules(module) if not path][-1]


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether any ``fnmatch`` pattern matches the path; a leading ``*.`` also matches at the top level."""
    rooted = f".{path}" if path else ""
    return any(fnmatchcase(path, pattern) or fnmatchcase(rooted, pattern) for pattern in patterns)


def topmost_matches(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that match a pattern and are inside no other matching module."""
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for path, layer in named_modules(module):
        if layer not in inside and matches(path, patterns):
            layers.append(layer)
            inside.update(layer.modules())
    return layers


def modules_inside(module: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    """The modules that match a pattern, and everything inside them."""
    return {part for layer in topmost_matches(module, patterns) for part in layer.modules()}


def as_patterns(patterns: Sequence[str], argument: str) -> tuple[str, ...]:
    """The patterns as a tuple.

    Raises:
        TypeError: for a single string, as each of its characters would be a pattern, and for anything but strings.
    """
    if isinstance(patterns, str):
        raise TypeError(f"`{argument}` must be a sequence of patterns, got the string {patterns!r}.")
    for pattern in patterns if isinstance(patterns, Iterable) else [patterns]:
        if not isinstance(pattern, str):
            raise TypeError(f"`{argument}` must be a sequence of patterns, got {pattern!r}. {_INSTEAD}")
    return tuple(patterns)


def check_patterns(module: nn.Module, patterns: Sequence[str], argument: str) -> None:
    """Check that each pattern matches a module.

    Raises:
        TypeError: for a single string.
        ValueError: if a pattern matches no module; the message names the pattern and the layers.
    """
    check_patterns_among(list(named_modules(module)), patterns, argument)


def check_patterns_among(modules: Sequence[tuple[str, nn.Module]], patterns: Sequence[str], argument: str) -> None:
    """Like :func:`check_patterns`, for modules already listed with their paths; the model itself comes first."""
    for pattern in as_patterns(patterns, argument):
        if not any(matches(path, (pattern,)) for path, _ in modules):
            hint = _meant(pattern, [path for path, _ in modules])
            own = [path for path, layer in modules if path and next(layer.parameters(recurse=False), None) is not None]
            raise ValueError(
                f"The `{argument}` pattern {pattern!r} matches no module of {type(modules[0][1]).__name__}."
                f" Its layers are: {', '.join(own[:10])}{', ...' if len(own) > 10 else ''}.{hint}"
            )


def _meant(pattern: str, paths: Sequence[str]) -> str:
    """``" Did you mean ...?"`` for the closest path, or end of a path, to the pattern; empty if none is close."""
    end = pattern.removeprefix("*.")
    if path := closest(end, paths):
        return f" Did you mean {path!r}?"
    ends = dict.fromkeys(path.split(".", at)[-1] for path in paths for at in range(1, path.count(".") + 1))
    found = closest(end, ends)
    return f" Did you mean {f'*.{found}'!r}?" if found else ""


def matching_tensors(names: Sequence[str], patterns: Sequence[str], asker: str) -> list[int]:
    """Positions of the tensor names that any ``fnmatch`` pattern matches.

    Raises:
        ValueError: if a pattern matches no name; the message has ``asker``, the pattern and the first names.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{asker}: the pattern {pattern!r} matches none of the {len(names)} tensors of the model."
                f" The first ones are: {', '.join(names[:6])}."
            )
    return [row for row, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in patterns)]
