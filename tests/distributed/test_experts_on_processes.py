"""Experts in real processes on the CPU, where each process routes its own tokens: sharded by FSDP2, and replicated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_processes

pytest.importorskip("transformers.integrations.moe", reason="before transformers 5 experts are linear layers")
pytestmark = pytest.mark.slow

BODY = """
from types import SimpleNamespace
from torch.distributed.fsdp import fully_shard
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from lightning_fp8.modules.all_gather import gather_in_fp8

config = SimpleNamespace(num_local_experts=3, hidden_size=16, intermediate_size=16, hidden_act="silu",
                         swiglu_alpha=1.7, swiglu_limit=7.0, _experts_implementation="eager")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.experts = MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x, index):
        return self.experts(self.first(x), index, torch.full(index.shape, 0.5))


def train(model, is_sharded):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 16, generator=generator)
        # the second process has no token for expert 2, and the first none for expert 0 in the last step
        index = torch.tensor([[0, 1]] * 6) if rank else torch.tensor([[2, 1]] * 6 if step == 2 else [[0, 2]] * 6)
        model(x, index).square().mean().backward()
        if not is_sharded:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    state = scaling_state(model)
    parts = {name: part.full_tensor() if is_sharded else part for name, part in model.named_parameters()}
    # a process casts only the weights of experts that it has tokens for
    return {"scale": state.scale[: state.delayed].clone(), "history": state.amax_history[:4].clone(),
            **{name: part.detach().clone() for name, part in parts.items()}}


start = convert(Net(), DelayedScaling(amax_history_len=4))
result["replicated"] = train(copy.deepcopy(start), False)
for gathers in (False, True):
    sharded = copy.deepcopy(start)
    fully_shard(sharded.first)
    fully_shard(sharded)
    if gathers:
        result["gathered"] = gather_in_fp8(sharded)
    result[f"sharded {gathers}"] = train(sharded, True)
experts = fully_shard(copy.deepcopy(start)).experts
for sharded in ("all", "biases"):
    try:
        experts._computed(torch.randn(6, 16), torch.zeros(6, dtype=torch.int64))
    except NotImplementedError as error:
        result[sharded] = str(error)
    if sharded == "all":
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, nn.Parameter(getattr(experts, name).full_tensor()))
"""


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_sharded_experts_train_like_replicated_ones(kind: str, tmp_path: Path) -> None:
    first, second = run_processes(BODY.replace(" = MixtralExperts(", f" = {kind}Experts("), tmp_path)
    assert first["gathered"] == ["first"]
    expected = first["replicated"]
    # the scales follow from the tokens of both processes
    assert torch.equal(expected["scale"], second["replicated"]["scale"])
    assert (expected["history"][:3] > 0).all()
    for found in (first["sharded False"], second["sharded True"]):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    whats = {"all": "weight", "biases": "bias"} if kind == "GptOss" else {"all": "weight"}
    for sharded, what in whats.items():
        assert f"'experts.gate_up_proj.0': the {what} is distributed over processes" in first[sharded]
