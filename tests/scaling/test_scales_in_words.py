from __future__ import annotations

import torch
from torch import nn

from lightning_fp8 import convert, scaling_state
from lightning_fp8.scaling.statistics import scales_in_words


def test_three_tensors_of_the_first_layer() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16)))
    state = scaling_state(model)
    assert scales_in_words(state) == []
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    x = torch.full((4, 16), 2.0)
    (model[0](x) * 0.5).sum().backward()
    state.update()
    assert scales_in_words(state) == [
        "0.input: the largest value in the window, 2, times the scale, 224, is 448, and E4M3 holds up to 448",
        "0.grad_output: the largest value in the window, 0.5, times the scale, 1.15e+05, is 57344, and E5M2 holds up to"
        " 57344",
        "0.weight: the largest value now, 0.25, times the scale, 1.79e+03, is 448, and E4M3 holds up to 448",
    ]
