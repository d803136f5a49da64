"""No training step waits for the device, on CPU tensors in place of CUDA ones; ``tests/support/no_waiting.py`` finds
every wait, here shown with faults that are put into the package.
"""

from __future__ import annotations

import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, seeded
from moved import to_current
from no_waiting import NoWaiting
from published_weights import KINDS, with_codes
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    BlockScaling,
    DelayedScaling,
    Fp8Precision,
    MXScaling,
    callbacks,
    convert,
    scaling_state,
    weights_unchanged,
)
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules.all_gather import gather_in_fp8
from lightning_fp8.plugins import fsdp2_policy
from lightning_fp8.scalings.recipe import RECIPES, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*", "ignore:.*returned a view tensor.*")
DEVICE = torch.device("cpu")


@pytest.fixture
def waits(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[NoWaiting]:
    with NoWaiting(monkeypatch) as finder:
        yield finder
        finder.stop()


def encoder() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(layer, nn.Linear(32, 16))


class Loop:
    """A training by hand; each call is an optimizer step of two micro-batches."""

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> None:
        self.state = scaling_state(model)
        self.model, self.forward = model, forward or model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.x = torch.randn(3, 11, 32, device=DEVICE)

    def __call__(self) -> None:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.forward(self.x).float().square().mean()
            loss.backward()
        self.state.update()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [*((recipe, "auto") for recipe in RECIPES), ("fp8-delayed", "reference"), ("fp8-mx", "reference")],
)
def test_loops(waits: NoWaiting, recipe: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    step = Loop(convert(encoder(), RECIPES[recipe]()))
    step()
    assert [waits.of(step) for _ in range(3)] == [[]] * 3
    step.model.eval()
    with torch.no_grad():
        assert waits.of(lambda: step.forward(step.x)) == []


def test_histories_are_emptied_at_once(waits: NoWaiting) -> None:
    step = Loop(convert(encoder()))
    step()
    saved = {name: value.clone() for name, value in step.model.state_dict().items()}
    for empty in (step.state.reset, lambda: step.model.load_state_dict(saved)):
        assert waits.of(empty) == []
        assert not step.state.amax_history.any()
        assert waits.of(step) == []


def fallen_back() -> nn.Module:
    model = convert(encoder())
    fall_back(model, "0.linear1")
    to_current(scaling_state(model), 0)
    return model


def frozen() -> nn.Module:
    model = encoder()
    model[0].requires_grad_(False)
    return convert(model, frozen_weights="fp8")


def published(kind: str, recipe: Recipe) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 136), nn.SiLU(), nn.Linear(136, 40))
    with_codes(model[2], kind, device=DEVICE)
    return convert(model, recipe, frozen_weights="fp8")


def recomputed() -> nn.Module:
    model = convert(encoder())
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        fallen_back,
        frozen,
        recomputed,
        lambda: convert(encoder(), DelayedScaling(wgrad="bf16"), overrides={"1": {"fprop": "bf16"}}),
        lambda: convert(nn.Sequential(nn.Linear(32, 47), nn.SiLU(), nn.Linear(47, 19))),
    ],
    ids=["fallen back", "frozen", "recomputed", "products in bf16", "ragged"],
)
def test_layers(waits: NoWaiting, make: Callable[[], nn.Module]) -> None:
    step = Loop(make())
    step()
    assert [waits.of(step) for _ in range(2)] == [[]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_a_checkpoint_and_their_first_use(waits: NoWaiting, kind: str) -> None:
    own = {"blocks": BlockScaling(), "mx": MXScaling(), "squares": MXScaling()}.get(kind)
    for recipe in (DelayedScaling(), *filter(None, [own])):
        step = Loop(published(kind, recipe))
        step()
        assert waits.of(step) == []
        with_codes(step.model[2], kind, device=DEVICE)
        assert waits.of(step) == []


def test_inf_is_reported_a_step_later(waits: NoWaiting) -> None:
    step, said = Loop(convert(encoder())), []
    for number in range(5):
        step.x[0, 0, 0] = torch.inf if number == 2 else 0.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert waits.of(step) == []
        said.append([str(one.message) for one in caught if "inf or NaN" in str(one.message)])
    assert [len(messages) for messages in said] == [0, 0, 0, 1, 0]
    assert "at optimizer step 3 of this model" in said[3][0]


def test_inf_in_the_last_step_is_reported_at_the_end(waits: NoWaiting) -> None:
    step = Loop(convert(encoder()))
    step()
    step.x[0, 0, 0] = torch.inf
    assert waits.of(step) == []
    state = scaling_state(step.model)
    with pytest.warns(UserWarning, match="inf or NaN in .* at optimizer step 2 of this model"):
        state.model.notices.on_end(state)


def compiled(waits: NoWaiting, model: nn.Module) -> tuple[Loop, list[str]]:
    """Its loop, and what the compiler's graphs do: "made" and "run"."""
    torch.compiler.reset()
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append("made")
        made = lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: (seen.append("run"), made(*args))[1]

    return Loop(model, waits.compiled(model, backend=backend, fullgraph=True)), seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled(waits: NoWaiting, recipe: str) -> None:
    layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    step, seen = compiled(waits, convert(layers, RECIPES[recipe]()))
    step()
    seen.clear()
    assert waits.of(step) == []
    assert seen == ["run"] * 2


@pytest.fixture
def one_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def sharded(gather: bool) -> nn.Module:
    model, mesh = encoder(), init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=fsdp2_policy())
    convert(model)
    if gather:
        assert len(gather_in_fp8(model)) == 5
    return model


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("gather", [False, True], ids=["gathered in bf16", "gathered in FP8"])
def test_fsdp2(waits: NoWaiting, gather: bool) -> None:
    step = Loop(sharded(gather))
    step()
    assert [waits.of(step) for _ in range(2)] == [[]] * 2
    step.model.eval()
    with torch.no_grad():
        assert waits.of(lambda: step.forward(step.x)) == []


class Begin(Callback):
    """The first callback, which begins a step."""

    def __init__(self, waits: NoWaiting) -> None:
        self.waits = waits

    def on_train_batch_start(self, *_: Any) -> None:
        self.waits.start()


class End(Callback):
    """The last callback, which ends it."""

    def __init__(self, waits: NoWaiting) -> None:
        self.waits = waits
        self.found: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(self.waits.stop())


def trained(waits: NoWaiting, path: Path, *given: Callback, **settings: Any) -> list[list[str]]:
    """The waits of each of the batches of a run, but for the first."""
    end = End(waits)
    watched = [Begin(waits), *given, end]
    make_trainer(path, callbacks=watched, logger=CSVLogger(path), log_every_n_steps=2, **settings).fit(
        seeded(), loader(16 * 6, shuffle=False)
    )
    assert len(end.found) == 6
    return end.found[1:]


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp8-mx"},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-true"},
        {"plugins": Fp8Precision(param_dtype="bfloat16"), "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ],
    ids=lambda settings: next(iter(settings.values())) if "precision" in settings else "parameters in bf16",
)
def test_trainers(waits: NoWaiting, settings: dict[str, Any], tmp_path: Path) -> None:
    assert trained(waits, tmp_path, **settings) == [[]] * 5


# what waits, by its documentation, in a batch that is due: one copy
CALLBACKS: dict[str, tuple[Callable[[], Callback], list[str]]] = {
    "DtypeAudit": (callbacks.DtypeAudit, []),
    "Fp8ThroughputMonitor": (
        lambda: callbacks.Fp8ThroughputMonitor(lambda batch: 16, window_size=2, peak_flops=1e9),
        [],
    ),
    # the switch, before the third batch
    "PrecisionSchedule": (lambda: callbacks.PrecisionSchedule({2: {"net.0": "fp8-current", "net.2": "bf16"}}), []),
    "RunRecord": (callbacks.RunRecord, []),
    "ScaleFactorLogger": (
        lambda: callbacks.ScaleFactorLogger(3, prog_bar=True),
        ["lightning_fp8/scaling/statistics.py tensor_statistics: cpu"],
    ),
    "Fp8Monitor": (
        lambda: callbacks.Fp8Monitor(3, "current", thresholds={"saturated": 0.0}, checks_in_a_row=1),
        [
            "lightning_fp8/callbacks/watch.py check: cpu",
            "lightning_fp8/callbacks/products.py ratios: cpu",
            "lightning_fp8/callbacks/loss.py check: cpu",
        ],
    ),
}


@pytest.mark.parametrize("name", callbacks.__all__)
def test_callbacks(waits: NoWaiting, name: str, tmp_path: Path) -> None:
    make, due = CALLBACKS[name]
    # the third and the sixth batch are due
    assert trained(waits, tmp_path, make()) == [[], due, [], [], due]


def test_exponents_are_logged_with_the_same_copy(waits: NoWaiting, tmp_path: Path) -> None:
    make, due = CALLBACKS["ScaleFactorLogger"]
    assert trained(waits, tmp_path, make(), precision="fp8-block") == [[], due, [], [], due]
    logged = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert "fp8/net.0.grad_output/largest_exponent" in logged


def test_experts_wait_once(waits: NoWaiting) -> None:
    from experts import TOKENS, WIDTH, experts, routing

    index, weights = (one.to(DEVICE) for one in routing())
    step = Loop(convert(experts()), lambda x: step.model(x, index, weights))
    step.x = torch.randn(TOKENS, WIDTH, device=DEVICE)
    step()
    assert waits.of(step) == ["lightning_fp8/modules/experts.py _tokens_by_expert: tolist"] * 2


@pytest.mark.parametrize("form", ["gate", "transposed, biases, interleaved gate", "Llama 4"])
def test_experts_in_groups_do_not_wait(
    form: str, grouped_half: Counter[str], waits: NoWaiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    import experts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    for name in ("WIDTH", "HIDDEN"):
        monkeypatch.setattr(experts, name, 64)
    monkeypatch.setitem(experts.FORMS, "Llama 4", Llama4TextExperts)
    given = [] if form == "Llama 4" else [one.to(DEVICE) for one in experts.routing()]
    step = Loop(convert(experts.experts(form)), lambda x: step.model(x, *given))
    step.x = torch.randn(experts.TOKENS, 64, device=DEVICE)
    step()
    grouped_half.clear()
    assert waits.of(step) == []
    assert any("GROUPED" in name for name in grouped_half)
    with torch.inference_mode(), weights_unchanged(step.model.eval()):
        assert [waits.of(lambda: step.forward(step.x)) for _ in range(2)] == [[]] * 2


# what waits, and what the finder calls it; s is on the device
FAULTS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda s: s[0].item(), "_local_scalar_dense"),
    "float": (lambda s: float(s[0]), "_local_scalar_dense"),
    "a branch": (lambda s: 1 if (s > 0).any() else 0, "_local_scalar_dense"),
    "a tensor as index": (lambda s: s[s.argmax()], "_local_scalar_dense"),
    "allclose": (lambda s: torch.allclose(s, s), "allclose"),
    "equal": (lambda s: torch.equal(s, s), "equal"),
    "nonzero": (lambda s: torch.where(s > 0), "nonzero"),
    "masked_select": (lambda s: s.masked_select(s > 0), "masked_select"),
    "a mask": (lambda s: s[s > 0], "index"),
    "a mask to write": (lambda s: s.__setitem__(s > 0, s * 2), "index_put_"),
    "a list as index": (lambda s: s[[0, 1]], "index"),
    "a list": (lambda s: torch.tensor([1.0, 2.0], device=s.device), "tensor"),
    "a new list": (lambda s: s.new_tensor([1.0, 2.0]), "new_tensor"),
    "moved to the device": (lambda s: torch.ones(2).to(s.device), "to"),
    "moved to the host": (lambda s: s.to("cpu", non_blocking=True), "to"),
    "cpu": (lambda s: s.cpu(), "cpu"),
    "tolist": (lambda s: s.tolist(), "tolist"),
    "numpy": (lambda s: s.numpy(), "numpy"),
    "copied to the device": (lambda s: s.copy_(torch.ones(2), non_blocking=True), "copy_"),
    "copied to the host": (lambda s: torch.empty(2, pin_memory=True).copy_(s), "copy_"),
    "synchronize": (lambda s: torch.cuda.synchronize(s.device), "synchronize"),
    "an event": (lambda s: torch.cuda.Event().synchronize(), "synchronize"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_waits(waits: NoWaiting, fault: str) -> None:
    call, what = FAULTS[fault]
    scale = torch.ones(2, device=DEVICE)
    assert waits.of(lambda: call(scale)) == [f"tests/ops/test_no_waiting.py <lambda>: {what}"]


def test_what_does_not_wait(waits: NoWaiting) -> None:
    scale = torch.ones(2, device=DEVICE)
    on_host = torch.zeros(2, device="cpu", pin_memory=True)

    def call() -> None:
        on_host.copy_(scale * 2, non_blocking=True)
        if (on_host > 0).any() and on_host[on_host > 0].tolist():
            scale.copy_(on_host, non_blocking=True)
        scale[scale > 1] = 0.0
        scale[:1], scale[1] = 2.0, scale[0]
        scale.mul_(torch.tensor(2.0)).index_select(0, scale.argmax().view(1))

    assert waits.of(call) == []


# by function of the package: how often an optimizer step of two micro-batches calls it, for two layers
PLACES = {
    "scaling.model.Fp8Model.on_step_ends": 1,  # in a hook of the optimizer's step
    "scalings.launches.new_result": 8,  # casts of inputs and gradients
    "modules.weights_together.cast_together": 1,
}


def put_in(monkeypatch: pytest.MonkeyPatch, place: str, fault: Callable[[], object]) -> None:
    """Let this function of the package begin with the fault."""
    function = pkgutil.resolve_name(f"lightning_fp8.{place}")
    monkeypatch.setattr(f"lightning_fp8.{place}", lambda *args, **kwargs: (fault(), function(*args, **kwargs))[1])


ITEM = "tests/ops/test_no_waiting.py <lambda>: _local_scalar_dense"


@pytest.mark.parametrize("place", PLACES)
def test_where_it_waits(waits: NoWaiting, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Loop(convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))))
    put_in(monkeypatch, place, lambda: step.state.scale[0].item())
    step()
    assert waits.of(step) == [ITEM] * PLACES[place]
