"""What the example models compute, where they are created, and how their weights are initialized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_step import one_step
from torch import Tensor, nn

from lightning_fp8 import convert, scaling_state
from lightning_fp8.examples import ByteGPT, EncoderClassifier, StdlibText, VisionTransformer
from lightning_fp8.examples.transformer_block import Block

pytestmark = pytest.mark.filterwarnings("ignore:.*enable_nested_tensor.*")


# the GPT


def gpt(**changed: Any) -> ByteGPT:
    torch.manual_seed(1)
    return ByteGPT(**{"layers": 2, "width": 32, "heads": 2, "context": 16, **changed})


def test_checkpointed_activations_change_nothing() -> None:
    plain, recomputed = convert(gpt()), convert(gpt(checkpoint_activations=True))
    batch = torch.randint(0, 256, (2, 17), dtype=torch.uint8)
    passes: list[Block] = []
    for block in recomputed.blocks:
        block.register_forward_pre_hook(lambda block, _: passes.append(block))
    for model in (plain, recomputed):
        with torch.autocast("cpu", torch.bfloat16):
            model.loss(batch).backward()
        scaling_state(model).update()
    assert len(passes) == 2 * 2
    for (name, one), two in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name
    assert torch.equal(scaling_state(plain).amax_history, scaling_state(recomputed).amax_history)


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_created_on_the_device_in_the_dtype_of_the_precision(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.dtype, torch.device]] = []
    create = ByteGPT._create

    def watched(model: ByteGPT) -> None:
        create(model)
        seen.extend((p.dtype, p.device) for p in model.parameters())

    monkeypatch.setattr(ByteGPT, "_create", watched)
    model = gpt(create_on_device=True)
    assert not list(model.parameters())
    trainer = one_step(model, StdlibText(16, 4, 4, 20_000), precision, tmp_path)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert set(seen) == {(dtype, torch.device("cpu"))}
    weight = model.head.weight
    trainer.validate(model, StdlibText(16, 4, 4, 20_000), verbose=False)
    assert model.head.weight is weight
    with torch.device("meta"):
        later = gpt(create_on_device=True)
        later.configure_model()
    assert {p.device.type for p in later.parameters()} == {"meta"}


def test_weights_start_as_in_gpt_2() -> None:
    model = gpt(layers=8, width=128)
    deviation = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    assert len(deviation) == 3 + 4 * 8
    for name, found in deviation.items():
        into_stream = name.endswith(("out.weight", "down.weight"))
        assert found == pytest.approx(0.02 / 4 if into_stream else 0.02, rel=0.05), name
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))


def test_a_byte_sees_only_those_before_it_and_a_patch_all() -> None:
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    model = gpt()
    moved = (model(tokens) - model(changed)).abs().amax(-1)[0] > 0
    assert moved.tolist() == [position >= 9 for position in range(16)]
    x = torch.randn(1, 5, 32, requires_grad=True)
    Block(32, 2, causal=False)(x)[0, 0].sum().backward()
    assert (x.grad.abs().amax(-1) > 0).all()


# the classifiers


def test_patches_of_the_vision_transformer() -> None:
    model = VisionTransformer(size=6, patch=2, width=4, heads=2, layers=1)
    nn.init.eye_(model.embedding.weight)
    nn.init.constant_(model.class_token, 9.0)
    with torch.no_grad():
        model.positions.copy_(100 * torch.arange(10)[:, None])
    images = torch.arange(2 * 36.0).view(2, 6, 6)
    inputs: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    model(images)
    expected = np.full((2, 1 + 9, 4), 9.0)
    for image in range(2):
        for row in range(3):
            for column in range(3):
                corner = images[image].numpy()[2 * row :, 2 * column :]
                expected[image, 1 + 3 * row + column] = corner[:2, :2].ravel()
    np.testing.assert_array_equal(inputs[0].detach().numpy(), expected + 100 * np.arange(10)[:, None])


def test_rows_of_an_image_are_the_tokens_of_the_encoder() -> None:
    torch.manual_seed(0)
    model = EncoderClassifier(size=8, width=16, heads=2)
    images = torch.randn(3, 8, 8)
    tokens = torch.stack([model.embedding(images[:, row]) + model.positions[row] for row in range(8)], 1)
    expected = model.head(torch.stack([*model.encoder(tokens).unbind(1)]).mean(0))
    torch.testing.assert_close(model(images), expected)
    assert model(torch.randn(3, 8, 8)).shape == (3, 10)


def test_sizes_that_do_not_divide() -> None:
    for kind in (ByteGPT, EncoderClassifier, VisionTransformer):
        with pytest.raises(ValueError, match=f"{kind.__name__}: `width` must .* width=10 and heads=4"):
            kind(width=10, heads=4)
    with pytest.raises(ValueError, match=r"`size` must .* size=30 and patch=4"):
        VisionTransformer(size=30, patch=4)
