"""Random changes of a model's structure: whatever they are, it has one state, and each layer its own histories."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from projections import WIDTH, Shared
from torch import nn

from lightning_fp8 import convert, scaling_state, unconvert
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.gemm import Gemm

KINDS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    Shared,
]
CHANGES = ["add", "replace", "copy", "pickle", "convert", "convert a part", "unconvert a part", "load a part"]


def gemms(model: nn.Module) -> dict[str, Gemm]:
    layers = ((path, layer) for path, layer in model.named_modules() if isinstance(layer, Fp8Module))
    return {".".join(filter(None, (path, name))): gemm for path, layer in layers for name, gemm in layer.fp8.items()}


class Changing:
    """A model, and how often an amax of each of its GEMMs has been pushed since it was converted or loaded."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.model = nn.ModuleDict({"a": self.new(), "b": nn.ModuleDict({"c": self.new()})})
        self.pushed: dict[Gemm, int] = {}
        # former parts, whose layers go on to exist
        self.former: list[nn.Module] = []

    def new(self) -> nn.Module:
        return self.draw.choice(KINDS)()

    def parts(self, of: nn.ModuleDict | None = None) -> Iterator[tuple[nn.ModuleDict, str, nn.Module]]:
        of = self.model if of is None else of
        for name, part in of.items():
            if isinstance(part, nn.ModuleDict):
                yield from self.parts(part)
            else:
                yield of, name, part

    def change(self, kind: str, number: int) -> None:
        holder, name, part = self.draw.choice([*self.parts()])
        if kind == "add":
            holder[f"n{number}"] = self.new()
        elif kind == "replace":
            self.former.append(part)
            holder[name] = self.new()
        elif kind in ("copy", "pickle"):
            other = copy.deepcopy(part) if kind == "copy" else pickle.loads(pickle.dumps(part))
            self.pushed |= {new: self.pushed[gemm] for gemm, new in zip(gemms(part).values(), gemms(other).values())}
            holder[f"n{number}" if kind == "copy" else name] = other
        elif kind == "unconvert a part":
            unconvert(part)
        elif kind == "load a part":
            part.load_state_dict(part.state_dict())
            self.pushed |= dict.fromkeys(gemms(part).values(), 0)
        else:
            convert(self.model if kind == "convert" else part)
            self.pushed = {**dict.fromkeys(gemms(self.model).values(), 0), **self.pushed}

    def train(self) -> None:
        ran = [part for _, _, part in self.parts() if self.draw.random() < 0.7]
        for part in ran:
            part(torch.randn(4, WIDTH)).sum().backward()
        if gemms(self.model):
            scaling_state(self.model).update()
        for part in ran:
            for gemm in gemms(part).values():
                self.pushed[gemm] += 1

    def check(self) -> None:
        if not gemms(self.model):
            return
        state, in_front = scaling_state(self.model), set()
        for path, gemm in gemms(self.model).items():
            assert gemm.state is state is scaling_state(self.model[path.partition(".")[0]])
            # from the model, or from the only part of it that is converted
            assert path.endswith(gemm.name)
            in_front.add(path.removesuffix(gemm.name))
            history = state.amax_history[:, state.names.index(f"{gemm.name}.grad_output".lstrip("."))]
            assert int((history > 0).sum()) == min(self.pushed[gemm], len(history)), path
        assert len(in_front) == 1
        assert len(set(state.module_names)) == len(state.module_names)


@pytest.mark.filterwarnings("ignore:lightning_fp8")
@pytest.mark.parametrize("seed", range(8))
def test_each_layer_keeps_its_histories(seed: int) -> None:
    changing = Changing(seed)
    convert(changing.model)
    changing.pushed = dict.fromkeys(gemms(changing.model).values(), 0)
    for number in range(24):
        if changing.draw.random() < 0.4:
            changing.train()
        else:
            changing.change(changing.draw.choice(CHANGES), number)
        changing.check()
