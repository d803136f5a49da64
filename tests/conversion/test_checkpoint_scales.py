"""``load_scales``: what it loads, and of files that are damaged or hold what they should not, what it says."""

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

from lightning_fp8 import convert, fall_back, load_scales, scaling_state

ENTRY = "The scaling state of '2.input' must hold single real numbers, and a list of them in `amax_history`, as tensors"


def trained(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    model = convert(small_mlp() if model is None else model, **settings)
    model(torch.randn(8, 32)).sum().backward()
    scaling_state(model).update()
    return model


def entries(**settings: Any) -> dict[str, Any]:
    return scaling_state(trained(**settings)).state_dict()


@pytest.mark.parametrize("form", ["entries", "under a key", "file"])
def test_load_scales(form: str, tmp_path: Path) -> None:
    source, x = trained(), torch.randn(4, 32)
    fall_back(source, "2")
    saved: Any = scaling_state(source).state_dict()
    if form != "entries":
        saved = {"model": source.state_dict(), "scaling": saved, "step": 3}
    if form == "file":
        torch.save(saved, tmp_path / "run.pt")
        saved = tmp_path / "run.pt"
    with torch.no_grad():
        expected = source.eval()(x)
        # a plain model is converted; into a converted one only the scales are loaded
        for model in (small_mlp(), convert(small_mlp())):
            model.load_state_dict(source.state_dict())
            assert load_scales(model, saved) is model
            assert torch.equal(model.eval()(x), expected)
            assert scaling_state(model).fallbacks == ("2",)


def test_a_plain_model_is_converted_where_the_checkpoint_has_scales() -> None:
    model = load_scales(small_mlp(), entries(ignore_modules=("2",)))
    assert scaling_state(model).module_names == ("0",)
    assert type(model[2]) is nn.Linear
    # those that are small, too
    saved = scaling_state(trained(nn.Sequential(nn.Linear(32, 8)), min_features=0)).state_dict()
    assert scaling_state(load_scales(nn.Sequential(nn.Linear(32, 8)), saved)).module_names == ("0",)


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


def test_something_else(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_scales(small_mlp(), tmp_path / "missing.ckpt")
    is_refused({"state_dict": small_mlp().state_dict(), "epoch": 1}, "Its keys are 'state_dict', 'epoch'.")
    is_refused({"generator": entries(), "critic": entries()}, "2 scaling states: pass the one")
    other = scaling_state(convert(nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)))).state_dict()
    is_refused(other, "In the checkpoint but not in the model: '1.input', '1.grad_output'")


VALUES: dict[str, tuple[str, Callable[[], Tensor], str]] = {
    "meta": ("scale", lambda: torch.ones((), device="meta"), "scale torch.float32 [] (torch.strided, meta)"),
    "sparse": (
        "amax_history",
        lambda: torch.ones(3).to_sparse(),
        "amax_history torch.float32 [3] (torch.sparse_coo",
    ),
    "quantized": (
        "scale",
        lambda: torch.quantize_per_tensor(torch.ones(()), 0.1, 0, torch.quint8),
        "scale torch.qui",
    ),
    "nested": (
        "amax_history",
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "amax_history torch.float32 nest",
    ),
    # without the check, the first comparison allocates 10**11 bytes
    "huge": (
        "amax_history",
        lambda: torch.ones(1).expand(10**11),
        "amax_history torch.float32 [100000000000] (",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors|torch.quantize|quantize_per_tensor")
@pytest.mark.parametrize("kind", VALUES)
def test_tensors_without_numbers_of_their_own(kind: str) -> None:
    field, make, found = VALUES[kind]
    saved = entries()
    saved["2.input"][field] = make()
    is_refused(saved, f"{ENTRY} with all of their values, got {found}")


def test_the_scale_of_a_vanishing_gradient_loads() -> None:
    model = convert(small_mlp())
    (model(torch.randn(8, 32)).sum() * 1e-38).backward()
    state = scaling_state(model)
    state.update()
    assert state.scale.max() == torch.finfo(torch.float32).max
    loaded = load_scales(small_mlp(), state.state_dict())
    assert torch.equal(scaling_state(loaded).scale[: state.delayed], state.scale[: state.delayed])


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    torch.save({**entries(), "\x1b[2J.input": entries()["2.input"]}, tmp_path / "run.pt")
    is_refused(tmp_path / "run.pt", r"In the checkpoint but not in the model: '\x1b[2J.input'.")


def test_objects_in_a_file_are_named_with_a_way_to_trust_it(tmp_path: Path) -> None:
    path = tmp_path / "package.ckpt"
    torch.save({"hyper_parameters": SimpleNamespace(width=32), "scaling": entries()}, path)
    is_refused(path, "loading such objects can run any code: 'types.SimpleNamespace'. If you trust the file, pass"
               f' `torch.load({str(path)!r}, "cpu", weights_only=False)` in place of its path')  # fmt: skip
    for trusted in (torch.load(str(path), "cpu", weights_only=False), path):
        with torch.serialization.safe_globals([SimpleNamespace]):
            assert scaling_state(load_scales(small_mlp(), trusted)).has_scales


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


OF_CALLBACK = "'fp8_scales' in the state of a callback is damaged: "


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
        (in_a_callback("%%"), OF_CALLBACK + "Error"),
        (in_a_callback(3), OF_CALLBACK + "TypeError"),
        (in_a_callback("aGVsbG8="), OF_CALLBACK),
        (in_a_callback(as_torch_saves([1])), OF_CALLBACK + "ValueError 'it holds"),
    ],
)
def test_a_damaged_checkpoint_of_transformers(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    is_refused(tmp_path, message)
