"""What a step of training is counted as, against formulas and torch's own count of FLOPs on real tensors."""

from __future__ import annotations

import copy
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8.estimation.counting import Attention, Elementwise, MatrixProduct, Step, count

TOKENS, WIDTH, HIDDEN, HEADS = 24, 32, 64, 4


def products(step: Step) -> dict[tuple[str | None, str], tuple[int, int, int, int]]:
    """By weight and product: M, N, K and how often."""
    return {
        (one.weight, one.product): (one.m, one.n, one.k, times)
        for one, times in step.operators.items()
        if isinstance(one, MatrixProduct)
    }


class Block(nn.Module):
    """A pre-norm Transformer block with separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks and a head, recomputed in backward or not."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def test_products_of_a_linear_layer() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert products(count(layer, torch.zeros(2, 3, 8))) == {
        ("0.weight", "fprop"): (6, 16, 8, 1),
        ("2.weight", "fprop"): (6, 4, 16, 1),
        ("2.weight", "dgrad"): (6, 16, 4, 1),
        ("2.weight", "wgrad"): (4, 16, 6, 1),
        # the input of the first layer needs no gradient
        ("0.weight", "wgrad"): (16, 8, 6, 1),
    }


def test_frozen_weights_have_no_wgrad() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers[1].requires_grad_(False)
    step = count(layers, torch.zeros(4, 8))
    assert {product for weight, product in products(step) if weight == "1.weight"} == {"fprop", "dgrad"}
    assert (step.trained, step.parameters) == (72, 144)


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_those_that_torch_counts_on_real_tensors(recompute: bool) -> None:
    model, x = Stack(recompute), torch.randn(2, TOKENS // 2, WIDTH)
    step = count(model, x)
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        model(x).sum().backward()
    of_attention = 4 * 2 * HEADS * (TOKENS // 2) ** 2 * (WIDTH // HEADS)
    ours = sum(one.flops * times for one, times in step.operators.items() if isinstance(one, MatrixProduct))
    # the math form of attention has two products forward and four backward, of the whole matrix of scores
    theirs = counter.get_total_flops() - 2 * of_attention * (4 if recompute else 3)
    assert ours == theirs
    flash = sum(one.flops * times for one, times in step.operators.items() if isinstance(one, Attention))
    # five products backward, and half of the scores are masked
    assert flash == 2 * of_attention / 2 * ((1 + 1 if recompute else 1) + 2.5)


@pytest.mark.parametrize("recompute", [False, True])
def test_each_weight_has_its_products(recompute: bool) -> None:
    step = count(Stack(recompute), torch.zeros(2, TOKENS // 2, WIDTH))
    found = Counter({(weight, product): row[3] for (weight, product), row in products(step).items()})
    layers = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("q", "k", "v", "out", "up", "down")]
    for name in layers:
        # nothing needs the output of the last layer of a block again
        recomputed = recompute and not name.endswith("down.weight")
        expected = {"fprop": 2 if recomputed else 1, "dgrad": 1, "wgrad": 1}
        if name.startswith("blocks.0") and name.endswith(("q.weight", "k.weight", "v.weight")):
            expected["dgrad"] = 1  # the norm before them has parameters
        assert {product: found[name, product] for product in expected} == expected, name
    assert {weight for weight, _ in found} == {*layers, "head.weight"}


def test_layers_that_share_an_input_have_one() -> None:
    step = count(Stack(), torch.zeros(1, TOKENS, WIDTH))
    inputs = Counter(len(tensor.weights) for tensor in step.inputs)
    # for each block: q, k and v; out; up; down; and the head
    assert inputs == {3: 2, 1: 7}
    assert all(tensor.elements == TOKENS * (HIDDEN if "down" in tensor.weights[0] else WIDTH) for tensor in step.inputs)


def test_what_autograd_keeps_for_the_products_alone() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            # tanh keeps its output too; the product of both keeps both
            return self.third(torch.tanh(self.second(self.first(x) + 1)))

    kept = {tensor.weights[0]: tensor.is_kept for tensor in count(Kept(), torch.zeros(4, 8)).inputs}
    assert kept == {"first.weight": True, "second.weight": True, "third.weight": False}


def test_copies_for_the_compute_dtype_are_told_apart() -> None:
    step = count(nn.Linear(8, 16), torch.zeros(4, 8))
    copies = {one: times for one, times in step.operators.items() if isinstance(one, Elementwise) and one.copies_for}
    # fp32 is read, bf16 written; of the weight, its input, and not of the bias
    assert copies == {
        Elementwise("_to_copy", 8 * 16 * 6, 0, "weight"): 1,
        Elementwise("_to_copy", 4 * 8 * 6, 0, "weight"): 1,
    }


def test_tied_weights_and_the_meta_device() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    with torch.device("meta"):
        step = count(Tied(), torch.zeros(2, 4, dtype=torch.long))
    assert products(step)["embedding.weight", "fprop"] == (8, 32, 16, 1)
    assert step.parameters == 32 * 16


def test_a_lightning_module_is_counted_by_its_training_step() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            assert self.trainer.training
            loss = nn.functional.mse_loss(self.layer(x), y)
            self.log("loss", loss * self.trainer.accumulate_grad_batches)
            return {"loss": loss}

    module = Module()
    with pytest.raises(
        RuntimeError, match=r"(?s)Module.training_step\(batch, 0\) failed.*too many values.*dataloader gives"
    ):
        count(module, torch.zeros(4, 8))
    step = count(module, (torch.zeros(4, 8), torch.zeros(4, 8)))
    assert products(step).keys() == {("layer.weight", "fprop"), ("layer.weight", "wgrad")}
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = module.trainer
    assert module.log == Module.log.__get__(module)


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch, random = torch.randn(4, 8), torch.get_rng_state()
    attention = nn.functional.scaled_dot_product_attention
    count(model, batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert nn.functional.scaled_dot_product_attention is attention


def test_multihead_attention_and_grouped_experts() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)
    step = count(layer, torch.zeros(2, 12, WIDTH))
    assert products(step)["self_attn.in_proj_weight", "fprop"] == (24, 3 * WIDTH, WIDTH, 1)
    assert sum(times for one, times in step.operators.items() if isinstance(one, Attention)) == 2
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    with torch.device("meta"):
        model, tokens = transformers.MixtralForCausalLM(config), torch.zeros(2, 16, dtype=torch.long)
    found = products(count(model, {"input_ids": tokens, "labels": tokens}))
    # 32 tokens go to 2 of 8 experts each, so 8 rows to each expert; gate and up are one weight
    assert found["model.layers.0.mlp.experts.gate_up_proj", "fprop"] == (8, 128, 32, 1)
    assert found["model.layers.0.mlp.experts.down_proj", "wgrad"][:3] in ((32, 64, 8), (64, 32, 8))


def test_a_model_that_needs_values_is_refused_by_the_operator() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[x.sum(-1).nonzero().flatten()])

    with pytest.raises(RuntimeError, match=r"Routed asks tensors for values.*stopped at aten\.nonzero"):
        count(Routed(), torch.zeros(4, 8))


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="Nothing that the model returns depends on a trained parameter"):
        count(nn.Linear(8, 8).requires_grad_(False), torch.zeros(2, 8))


def test_integers_of_the_batch_are_followed() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
            x = x[:, : int(copy.deepcopy(lengths).max())]
            if not x.isfinite().all() or torch.isnan(x).any() or x.isinf().any():
                raise ValueError
            x = x if mask.all() else x[mask.any(1).nonzero().flatten()]
            return self.layer(x)

    lengths, mask = torch.tensor([2, 5, 3]), torch.tensor([[True, False], [False, False], [True, True]])
    step = count(Packed(), {"x": torch.zeros(3, 7, 8), "lengths": lengths, "mask": mask})
    # two rows of the mask have anything, and the longest of all has five
    assert products(step)["layer.weight", "fprop"] == (10, 8, 8, 1)
    with pytest.raises(
        RuntimeError, match=r"stopped at aten\._local_scalar_dense.*unless the batch is on the meta device"
    ):
        count(Packed(), {"x": torch.zeros(3, 7, 8), "lengths": lengths.to("meta"), "mask": mask})
