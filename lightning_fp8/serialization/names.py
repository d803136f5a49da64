"""Maps tensors of a checkpoint to a model: under the same names, or as transformers 5 renames and merges them.

The rules of transformers are transforms, ``conversion_mapping.get_model_conversion_mapping``. A tensor of a file is a
part of a tensor of the model, or the other way round, so each rule becomes pairs of slices. The pairs work in both
directions: a writer uses them to find the tensors of the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from lightning_fp8.modules.paths import without_wrappers

Shape = tuple[int, ...]
# for each dimension, a slice; or an index if the other tensor lacks the dimension
Index = tuple[int | slice, ...]


class Piece(NamedTuple):
    """A part of a file's tensor that is a part of a model's tensor: ``model[at] = file[of]``.

    Attributes:
        name: name of the tensor in the file.
        of: the part of the file's tensor.
        target: name of the tensor in the model.
        at: the part of the model's tensor.
    """

    name: str
    of: Index
    target: str
    at: Index


@dataclass
class Placed:
    """Where the tensors of a file are in a model.

    Attributes:
        pieces: the pieces, in the order of the file.
        shapes: the shapes of the model's tensors according to the file.
        lacking: names that the file should have but lacks.
        twice: tensors of the file that are the same tensor of the model.
        unmerged: tensors to which a rule applies but that cannot be put together by it, with the reason.
        left_out: tensors that the class of the model does not use, such as layers for another purpose.
    """

    pieces: list[Piece] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unmerged: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    @cached_property
    def by_target(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor of the model; use it once all pieces are known."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.target, []).append(piece)
        return pieces

    @cached_property
    def by_name(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor of the file; use it once all pieces are known."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.name, []).append(piece)
        return pieces

    def add(self, name: str, target: str, shape: Shape, of: Index | None = None) -> None:
        """Add a tensor of a file, or a part of one, that is a whole tensor of the model."""
        if target in self.shapes:
            self.twice.append(f"{name} ({target})")
        else:
            self.shapes[target] = shape
            self.pieces.append(Piece(name, whole(shape) if of is None else of, target, whole(shape)))


def whole(shape: Shape) -> Index:
    """The index of all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def placed(model: nn.Module, own: Mapping[str, Shape], stored: Mapping[str, Shape]) -> Placed:
    """Find the tensors of a file in a model.

    Args:
        model: the model.
        own: shapes of its tensors.
        stored: shapes of the file's tensors, scales apart.
    """
    root, result = without_wrappers(model), Placed()
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(root, modeling.PreTrainedModel):
        for name, shape in stored.items():
            result.add(name, name, shape)
        return result
    rules = _Rules(root, own)
    merged: dict[str, dict[str, list[str]]] = {}
    for name, shape in stored.items():
        target, pattern = rules.place_of(name)
        if target not in own and (rules.leaves_out(name) or rules.leaves_out(target)):
            result.left_out.add(name)
        elif pattern is None or target not in own:
            # a tensor that the model lacks is reported under its own name
            result.add(name, target if target in own else name, shape)
        else:
            merged.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, by_pattern in merged.items():
        rules.merge(target, by_pattern, stored, result)
    return result


class _Rules:
    """The rules of transformers for a model."""

    def __init__(self, root: Any, own: Mapping[str, Shape]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self.root, self.own, self._rename = root, dict(own), rename_source_key
        rules = get_model_conversion_mapping(root)
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        left_out = list(root._keys_to_ignore_on_load_unexpected or ())
        # buffers that older files have; `from_pretrained` leaves them out too
        buffers = [name for name, _ in root.named_buffers()]
        kinds = ("rotary_emb.inv_freq", "position_ids")
        former = [kind for kind in kinds if any(name.endswith(kind) for name in buffers)]
        left_out += [rf"(^|\.){re.escape(kind)}$" for kind in former]
        self._left_out = [re.compile(pattern) for pattern in left_out]

    def leaves_out(self, name: str) -> bool:
        """Whether the class of the model has no use for a tensor."""
        return any(pattern.search(name) for pattern in self._left_out)

    def place_of(self, name: str) -> tuple[str, str | None]:
        """The model's tensor to which a file's tensor belongs, and the pattern of the rule that merges or splits it."""
        prefix = self.root.base_model_prefix
        target, pattern = self._rename(name, self._renamings, self._converters, prefix, self.own)
        if target not in self.own and self._rename(name, [], [], prefix, self.own)[0] in self.own:
            # like `from_pretrained`: a rule for files with other names
            target, pattern = self._rename(name, [], [], prefix, self.own)
        return target, pattern

    def merge(
        self, target: str, by_pattern: Mapping[str, list[str]], stored: Mapping[str, Shape], result: Placed
    ) -> None:
        """Add the pieces of the tensors that a rule merges, or of the tensor that it splits."""
        rule = self._by_pattern[next(iter(by_pattern))]
        kinds = [type(operation).__name__ for operation in rule.operations]
        names = [name for matches in by_pattern.values() for name in matches]
        if kinds in (["Chunk"], ["Split"]) and len(names) == 1:
            self._split(names[0], target, rule, stored[names[0]], result)
            return
        # by pattern, in the order in which the rule joins them
        groups, lacking = [], len(result.lacking)
        for pattern in rule.source_patterns:
            matches = by_pattern.get(pattern, [])
            if kinds[0] == "MergeModulelist":
                matches = self._by_number(pattern, matches, self.own[target][0], result)
            groups.append([_Assembled.of(name, stored[name]) for name in matches])
        if len(result.lacking) > lacking:
            return
        for operation, kind in zip(rule.operations, kinds):
            dim, together = getattr(operation, "dim", 0), list(chain.from_iterable(groups))
            if kind == "MergeModulelist" and dim == 0 and all(map(_agree, groups)):
                groups = [[_stacked(group)] for group in groups if group]
            elif kind == "Concatenate" and _agree(together, dim):
                groups = [[_joined(together, dim)]]
            else:
                groups = []
        if len(groups) != 1 or len(groups[0]) != 1:
            result.unmerged += [f"{name} {stored[name]} ({', '.join(kinds)})" for name in names]
            return
        tensor = groups[0][0]
        result.shapes[target] = tensor.shape
        result.pieces += [Piece(name, whole(shape), target, at) for name, shape, at in tensor.parts]

    def _by_number(self, pattern: str, names: list[str], count: int, result: Placed) -> list[str]:
        """The names sorted by the number in place of the pattern's ``*``; notes missing names."""
        by_number: dict[int, str] = {}
        around = ("", "")
        for name in names:
            match = re.search(pattern.replace("*.", r"(?P<number>\d+)\."), self._rename(name, self._renamings, [])[0])
            number = int(match["number"]) if match is not None and len(match["number"]) < 10 else -1
            if number in by_number:
                result.twice.append(f"{name} and {by_number[number]}")
            elif not 0 <= number < count:
                # unknown to the model
                result.pieces.append(Piece(name, (), name, ()))
            else:
                by_number[number] = name
                begin, _, end = name.rpartition(f".{number}.")
                around = begin, end
        missing = (number for number in range(count if by_number else 0) if number not in by_number)
        result.lacking += [f"{around[0]}.{number}.{around[1]}" for number in missing]
        return [by_number[number] for number in sorted(by_number)]

    def _split(self, name: str, target: str, rule: Any, shape: Shape, result: Placed) -> None:
        """Split a file's tensor into several of the model: into equal sizes, or into the sizes that these have."""
        dim = rule.operations[0].dim
        targets = [target.replace(rule.target_patterns[0], other) for other in rule.target_patterns]
        sizes = [self.own[key][dim] for key in targets if key in self.own]
        if len(sizes) < len(targets) or sum(sizes) != shape[dim]:
            result.unmerged.append(f"{name} {shape} (into {', '.join(targets)})")
            return
        begin = 0
        for key, size in zip(targets, sizes):
            part, of = [*shape], [*whole(shape)]
            part[dim], of[dim] = size, slice(begin, begin + size)
            result.add(name, key, tuple(part), tuple(of))
            begin += size


class _Assembled(NamedTuple):
    """A tensor made of several: its shape, and each tensor's name, shape and place in it."""

    shape: Shape
    parts: list[tuple[str, Shape, Index]]

    @staticmethod
    def of(name: str, shape: Shape) -> _Assembled:
        return _Assembled(shape, [(name, shape, whole(shape))])


def _agree(group: list[_Assembled], dim: int | None = None) -> bool:
    """Whether tensors have the same shape, apart from ``dim``."""
    if dim is not None and any(dim >= len(tensor.shape) for tensor in group):
        return False
    return len({tensor.shape if dim is None else tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in group}) < 2


def _stacked(group: list[_Assembled]) -> _Assembled:
    parts = [(name, shape, (number, *at)) for number, tensor in enumerate(group) for name, shape, at in tensor.parts]
    return _Assembled((len(group), *group[0].shape), parts)


def _joined(group: list[_Assembled], dim: int) -> _Assembled:
    parts: list[tuple[str, Shape, Index]] = []
    begin = 0
    for tensor in group:
        for name, shape, at in tensor.parts:
            part = at[dim]
            moved = part + begin if isinstance(part, int) else slice(part.start + begin, part.stop + begin)
            parts.append((name, shape, (*at[:dim], moved, *at[dim + 1 :])))
        begin += tensor.shape[dim]
    return _Assembled((*group[0].shape[:dim], begin, *group[0].shape[dim + 1 :]), parts)
