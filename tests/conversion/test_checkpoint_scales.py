"""``load_scales`` of files that are damaged, or hold what they should not: a ValueError says what, nothing changes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import convert, load_scales, scaling_state

ENTRY = "The scaling state of '2.input' must hold single real numbers, and a list of them in `amax_history`, as tensors"


def trained() -> nn.Module:
    model = convert(small_mlp())
    model(torch.randn(8, 32)).sum().backward()
    scaling_state(model).update()
    return model


def entries() -> dict[str, Any]:
    return scaling_state(trained()).state_dict()


def is_refused(checkpoint: Any, message: str) -> None:
    for model in (small_mlp(), convert(small_mlp())):
        kinds = [type(layer) for layer in model]
        with pytest.raises(ValueError) as error:  # noqa: PT011
            load_scales(model, checkpoint)
        assert message in str(error.value)
        assert str(error.value).isprintable()
        # not even in the chain of errors, which Python prints too
        assert error.value.__cause__ is None
        assert [type(layer) for layer in model] == kinds
        if kinds[0] is not nn.Linear:
            assert not scaling_state(model).amax_history.any()


VALUES: dict[str, tuple[str, Callable[[], Tensor], str]] = {
    "meta": ("scale", lambda: torch.ones((), device="meta"), "scale torch.float32 [] (torch.strided, meta)"),
    "sparse": (
        "amax_history",
        lambda: torch.ones(3).to_sparse(),
        "amax_history torch.float32 [3] (torch.sparse_coo, cpu)",
    ),
    "quantized": (
        "scale",
        lambda: torch.quantize_per_tensor(torch.ones(()), 0.1, 0, torch.quint8),
        "scale torch.quint8 [] (torch.strided, cpu)",
    ),
    "nested": (
        "amax_history",
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "amax_history torch.float32 nested",
    ),
    # without the check, the first comparison allocates 10**11 bytes
    "huge": (
        "amax_history",
        lambda: torch.ones(1).expand(10**11),
        "amax_history torch.float32 [100000000000] (torch.strided, cpu)",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors|torch.quantize|quantize_per_tensor")
@pytest.mark.parametrize("kind", VALUES)
def test_tensors_without_numbers_of_their_own(kind: str) -> None:
    field, make, found = VALUES[kind]
    saved = entries()
    saved["2.input"][field] = make()
    is_refused(saved, f"{ENTRY} with all of their values, got {found}")


@pytest.mark.parametrize("scale", [1e-40, 0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_would_give_nan(scale: float) -> None:
    saved = entries()
    saved["0.input"]["scale"] = torch.tensor(scale)
    is_refused(saved, "'0.input' must have a scale that is a positive normal fp32 number, got ")


def test_the_scale_of_a_vanishing_gradient_loads() -> None:
    model = convert(small_mlp())
    (model(torch.randn(8, 32)).sum() * 1e-38).backward()
    state = scaling_state(model)
    state.update()
    assert state.scale.max() == torch.finfo(torch.float32).max
    loaded = load_scales(small_mlp(), state.state_dict())
    assert torch.equal(scaling_state(loaded).scale[: state.delayed], state.scale[: state.delayed])


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    saved = {**entries(), "\x1b[2J.input": entries()["2.input"]}
    torch.save(saved, tmp_path / "run.pt")
    is_refused(tmp_path / "run.pt", r"In the checkpoint but not in the model: '\x1b[2J.input'.")


def test_objects_in_a_file_are_named_with_a_way_to_trust_it(tmp_path: Path) -> None:
    path = tmp_path / "package.ckpt"
    weights = small_mlp().state_dict()
    torch.save({"hyper_parameters": SimpleNamespace(width=32), "state_dict": weights, "scaling": entries()}, path)
    is_refused(path, "loading such objects can run any code: 'types.SimpleNamespace'. If you trust the file, pass"
               f' `torch.load({str(path)!r}, "cpu", weights_only=False)` in place of its path')  # fmt: skip
    for trusted in (torch.load(str(path), "cpu", weights_only=False), path):
        with torch.serialization.safe_globals([SimpleNamespace]):
            model = load_scales(small_mlp(), trusted)
        assert scaling_state(model).has_scales


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x80\x02\x1b[2J", None])
def test_a_damaged_file(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save(entries(), path)
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    is_refused(path, f"load_scales: {path} is damaged, or was not written by torch.save: ")


def in_a_callback(text: Any) -> str:
    return json.dumps({"stateful_callbacks": {"Fp8Callback": {"attributes": {"fp8_scales": text}}}})


def as_torch_saves(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trainer_state.json is damaged: JSONDecodeError"),
        ("[1, 2]", "trainer_state.json is damaged: AttributeError"),
        ("[" * 100_000, "trainer_state.json is damaged: RecursionError"),
        ('{"stateful_callbacks": 3}', "trainer_state.json is damaged: AttributeError"),
        ("{}", "has no scales"),
        ('{"stateful_callbacks": {"Fp8Callback": 3}}', "has no scales"),
        ('{"stateful_callbacks": {"Fp8Callback": {"attributes": 3}}}', "has no scales"),
        (in_a_callback("%%"), "'fp8_scales' in the state of a callback is damaged: Error"),
        (in_a_callback(3), "'fp8_scales' in the state of a callback is damaged: TypeError"),
        (in_a_callback("aGVsbG8="), "'fp8_scales' in the state of a callback is damaged: "),
        (
            in_a_callback(as_torch_saves([1])),
            "'fp8_scales' in the state of a callback is damaged: ValueError 'it holds",
        ),
    ],
)
def test_a_damaged_checkpoint_of_transformers(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    is_refused(tmp_path, message)


def test_scales_of_a_part_that_the_trained_model_had_elsewhere() -> None:
    whole = convert(nn.ModuleDict({"module": small_mlp()}))
    whole["module"](torch.randn(8, 32)).sum().backward()
    scaling_state(whole).update()
    scales, part = scaling_state(whole).state_dict(), small_mlp()
    with pytest.raises(ValueError, match=r"the scales of 'module\.0\.input', .* Sequential has the layers '0', '2'"):
        load_scales(part, scales)
    assert type(part[0]) is nn.Linear
    # the remedy
    load_scales(nn.ModuleDict({"module": part}), scales)
    assert scaling_state(part).has_scales
