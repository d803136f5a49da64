"""One cast for the input of several layers: the same numbers as separate casts, and never another tensor's payload."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from counted_casts import count_input_casts
from feed_forward_blocks import converted, llama
from functorch.compile import make_boxed_func
from pairwise import pairwise
from projections import MEMBERS, ROWS, WIDTH, Nested, Separate, Shared, train
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_fp8 import BlockScaling, CurrentScaling, MXScaling, convert, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules.phase import Phase
from lightning_fp8.scaling.precision import AS_SET, BF16
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.recipe import Recipe


def pair(
    make: Callable[[type[Shared]], nn.Module] = Nested, recipe: Recipe | None = None
) -> tuple[nn.Module, nn.Module]:
    """A converted model that shares casts, and the same one that does not."""
    shared, separate = make(Shared), make(Separate)
    separate.load_state_dict(shared.state_dict())
    assert scaling_state(convert(shared, recipe)).input_owners
    assert not scaling_state(convert(separate, recipe)).input_owners
    return shared, separate


def alone(kind: type[Shared]) -> nn.Module:
    return kind()


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.fixture
def input_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_input_casts(monkeypatch)


@pytest.mark.usefixtures("half")
def test_training_gives_the_numbers_of_separate_casts(input_casts: Counter[str]) -> None:
    shared, separate = pair()
    of_separate = train(separate)
    assert sum(input_casts.values()) == 3 * 2 * 8
    input_casts.clear()
    assert_same(train(shared), of_separate)
    assert input_casts == {f"blocks.{block}.{name}.input": 3 * 2 for block in (0, 1) for name in ("q", "out")}
    shared_state, separate_state = scaling_state(shared), scaling_state(separate)
    assert shared_state.every_tensor_has_history
    assert shared_state.names == separate_state.names
    for name, entry in separate_state.state_dict().items():
        assert all(torch.equal(shared_state.state_dict()[name][field], entry[field]) for field in entry)


def test_evaluation(input_casts: Counter[str]) -> None:
    shared, separate = pair()
    train(shared), train(separate)
    x = torch.randn(ROWS, WIDTH)
    shared.eval(), separate.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        input_casts.clear()
        with mode():
            y = shared(x)
            # an inference tensor does not count its changes, so nothing is shared
            assert sum(input_casts.values()) == (8 if mode is torch.inference_mode else 4)
            assert torch.equal(y, separate(x))


def changed_by_a_hook(model: nn.Module) -> None:
    for block in model.blocks:
        block.k.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))


def changed_in_place(model: nn.Module) -> None:
    for block in model.blocks:
        block.k.register_forward_pre_hook(lambda _, given: given[0].mul_(0.5) is None or None)


def changed_after_the_first(model: nn.Module) -> None:
    for block in model.blocks:
        block.q.register_forward_hook(lambda _, given, y: given[0].mul_(0.5) is None or None)


def changed_by_another_forward(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = lambda x, of=block: of.out(of.q(x).sigmoid() * of.k(x * 0.5) + of.v(x))


def a_view_changed(model: nn.Module) -> None:
    for block in model.blocks:
        block.k.register_forward_pre_hook(lambda _, given: given[0][:, : WIDTH // 2].neg_() is None or None)


CHANGES = [changed_by_a_hook, changed_in_place, changed_after_the_first, changed_by_another_forward, a_view_changed]
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize(
    ("change", "mode", "recipe"),
    [
        *pairwise(CHANGES, MODES, [CurrentScaling(), BlockScaling(), MXScaling()]),
        *((change, torch.enable_grad, None) for change in CHANGES),
    ],
)
def test_what_one_layer_is_given_instead_is_cast_for_it(
    change: Callable[[nn.Module], None], mode: Callable[[], Any], recipe: Recipe | None, input_casts: Counter[str]
) -> None:
    shared, separate = pair(recipe=recipe)
    change(shared), change(separate)
    with mode():
        x = torch.randn(ROWS, WIDTH)
        # without histories each cast has its own scale, so the results are those of separate casts
        found, casts = shared(x), input_casts["blocks.1.q.input"]
        assert torch.equal(found, separate(x))
    # two layers share a cast if something counts the changes of their tensor
    assert casts == (3 if mode is torch.inference_mode else 2)
    if mode is torch.enable_grad and recipe is None:
        mine, theirs = scaling_state(shared), scaling_state(separate)
        for block in ("blocks.0", "blocks.1"):
            amaxes = [theirs.amax[theirs.names.index(f"{block}.{name}.input")] for name in MEMBERS]
            assert mine.amax[mine.names.index(f"{block}.q.input")] == max(amaxes)


@pytest.mark.parametrize(("mode", "compiled"), [*((mode, False) for mode in MODES), (torch.inference_mode, True)])
def test_a_buffer_that_is_used_again(mode: Callable[[], Any], compiled: bool) -> None:
    shared, separate = pair(alone)
    calls = {name: getattr(shared, name) for name in MEMBERS}
    if compiled:
        torch._dynamo.reset()
        calls = {name: torch.compile(layer, backend="aot_eager") for name, layer in calls.items()}
    x = torch.randn(ROWS, WIDTH)
    with mode():
        # one after the other, with a change between; then each alone
        for name in "qkvkkqq":
            assert torch.equal(calls[name](x), getattr(separate, name)(x))
            x.copy_(torch.randn(ROWS, WIDTH))


def to_bf16_and_back(state: ScalingState) -> None:
    for choice in (BF16, AS_SET):
        state.switch("schedule", dict.fromkeys(range(len(state.precisions)), choice))


@pytest.mark.parametrize("drop", [ScalingState.discard, to_bf16_and_back])
def test_recorded_amaxes_dropped_between_two_layers_are_recorded_again(drop: Callable[[ScalingState], None]) -> None:
    model, x = convert(Shared()), torch.randn(ROWS, WIDTH)
    state = scaling_state(model)
    model.between = partial(drop, state)
    model(x)
    assert state.amax[state.names.index("q.input")] == x.abs().max()


@pytest.mark.usefixtures("cuda_half")
def test_columns_for_a_layer_behind(input_casts: Counter[str]) -> None:
    shared, separate = pair()
    for model in (shared, separate):
        for block in model.blocks:
            block.q.weight.requires_grad_(False)
    expected = train(separate)
    input_casts.clear()
    assert_same(train(shared), expected)
    assert input_casts["blocks.0.q.input"] == 3 * 2


@pytest.mark.parametrize(("fallen", "casts"), [("q", 1), ("v", 1), ("qk", 1), ("qkv", 0)])
def test_layers_that_fell_back(fallen: str, casts: int, input_casts: Counter[str]) -> None:
    shared, separate = pair()
    for name in fallen:
        for model in (shared, separate):
            for block in (0, 1):
                fall_back(model, f"blocks.{block}.{name}")
    x = torch.randn(ROWS, WIDTH)
    assert torch.equal(shared(x), separate(x))
    input_casts.clear()
    shared(x).sum().backward()
    assert input_casts["blocks.1.q.input"] == casts


def test_another_thread_casts_for_itself(input_casts: Counter[str]) -> None:
    # on a GPU, its stream would not wait for the current one
    model, x = convert(Shared()), torch.randn(ROWS, WIDTH)
    thread = threading.Thread(target=model.q, args=(x,))
    thread.start(), thread.join()
    model.k(x)
    assert input_casts["q.input"] == 2


def test_nothing_is_kept_alive() -> None:
    model = convert(Shared())
    shared = model.q.fp8[""].shared_input
    x = torch.randn(ROWS, WIDTH)
    model(x)
    assert not shared._made
    block, given = converted(llama), torch.randn(ROWS, 32)
    block(given)
    assert not block.gate_proj.fp8[""].shared_input._made
    model.q(x)
    payload = weakref.ref(next(iter(shared._made.value.values())).codes)
    assert payload() is not None
    del x
    assert payload() is None
    # there is no reference cycle, which would keep the weights' copies until the next collection
    rows = weakref.ref(model.q.fp8[""])
    gc.disable()
    try:
        del model, shared
        assert rows() is None
    finally:
        gc.enable()


def counting(casts: list[int]) -> Callable[..., Any]:
    """Inductor up to the graphs that it would compile; appends their numbers of casts."""

    def inner(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        casts.append(sum(node.target is torch.ops.lightning_fp8.cast.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    return partial(compile_fx, inner_compile=inner)


@pytest.mark.usefixtures("no_caches")
def test_compiled_graphs_cast_it_once() -> None:
    model, casts = convert(Shared()), []
    call = torch.compile(model, backend=counting(casts), fullgraph=True)
    x = torch.randn(ROWS, WIDTH)
    call(x).sum().backward()
    assert casts == [1 + 1, 0]
    casts.clear()
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    # a graph without gradients shows no changes in place
    assert casts == [3 + 1]
    assert model.q.fp8[""].slots["input", Phase.TRAINING].index is model.v.fp8[""].slots["input", Phase.TRAINING].index


@pytest.mark.usefixtures("no_caches")
def test_compiled_training_that_recomputes() -> None:
    shared, separate = pair()
    compiled = copy.deepcopy(shared)
    compiled.around = partial(recomputed, use_reentrant=False)
    call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    expected = train(separate)
    assert_same(train(compiled, call), expected)
    x = torch.randn(ROWS, WIDTH)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(call(x), separate(x))


@pytest.mark.usefixtures("no_caches")
def test_all_blocks_share_their_graphs() -> None:
    frames = []
    for kind in (Shared, Separate):
        torch._dynamo.reset()
        model = convert(nn.Sequential(*[kind() for _ in range(4)]))
        counter = CompileCounterWithBackend("eager")
        for block in model:
            block.compile(fullgraph=True, backend=counter)
        train(model, steps=2)
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH))
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] < 4


def recomputed(block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return checkpoint(block, x, **options)


def save_casts(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_cast = operator is torch.ops.lightning_fp8.cast.default
    return CheckpointPolicy.MUST_SAVE if is_cast else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_casts),
    },
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_activation_checkpointing(kind: str, input_casts: Counter[str]) -> None:
    shared, separate = pair()
    expected = train(separate)
    shared.around = partial(recomputed, **CHECKPOINTS[kind])
    input_casts.clear()
    assert_same(train(shared), expected)
    # each block once more, unless casts are saved
    assert input_casts["blocks.0.q.input"] == 3 * 2 * (1 if kind == "selective" else 2)


def of_inputs(state: ScalingState, field: str = "amax_history") -> dict[str, Tensor]:
    values = getattr(state, field)
    return {name: values[..., row] for row, name in enumerate(state.names) if name.endswith(".input")}


def assert_one_history(state: ScalingState) -> None:
    q, *others = (state.state_dict()[f"{name}.input"]["amax_history"] for name in MEMBERS)
    assert all(torch.equal(other, q) for other in others)


@pytest.mark.parametrize("loaded", MEMBERS)
def test_loading_weights_of_one_empties_the_history_of_all_that_share_its_input(loaded: str) -> None:
    shared, separate = pair(alone)
    train(shared), train(separate)
    state = scaling_state(shared)
    getattr(shared, loaded).load_state_dict(getattr(shared, loaded).state_dict())
    emptied = {*(f"{name}.input" for name in MEMBERS), f"{loaded}.grad_output"}
    for row, name in enumerate(state.names[: state.delayed]):
        assert state.amax_history[:, row].any() == (name not in emptied)
        assert (state.scale[row] == 1) == (name in emptied)
    scaling_state(separate).load_state_dict(state.state_dict())
    assert_same(train(shared), train(separate))
    assert_one_history(state)


@pytest.mark.parametrize("fallen", [False, True])
def test_a_first_layer_without_a_history_takes_that_of_the_others(fallen: bool) -> None:
    """It fell back while it was alone, or is converted later, in the middle of a step."""
    x, (shared, separate) = torch.randn(ROWS, WIDTH), pair(alone)
    if fallen:
        fall_back(separate, "q")
    else:
        shared, separate = (convert(kind(), ignore_modules=["q"]) for kind in (Shared, Separate))
        shared.load_state_dict(separate.state_dict())
    train(separate)
    expected = of_inputs(scaling_state(separate))["k.input"]
    scaling_state(shared).load_state_dict(scaling_state(separate).state_dict())
    shared.load_state_dict(separate.state_dict())
    if fallen:
        assert torch.equal(shared(x), separate(x))
    else:
        shared(x)
        convert(shared)
        amax = of_inputs(scaling_state(shared), "amax")
        assert [*amax.values()][:3] == [x.abs().max()] * 3
    state = scaling_state(shared)
    assert state.input_owners == {1: 0, 2: 0}
    histories, scales = of_inputs(state), of_inputs(state, "scale")
    for name in MEMBERS:
        assert torch.equal(histories[f"{name}.input"], expected)
        assert scales[f"{name}.input"] == 448 / expected.max()
    assert_one_history(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied: Callable[[nn.Module], nn.Module], input_casts: Counter[str]) -> None:
    model = convert(Shared())
    train(model)
    x = torch.randn(ROWS, WIDTH)
    # leaves a cast behind
    model.q(x)
    other = copied(model)
    rows = other.k.fp8[""]
    assert rows.shared_input is other.q.fp8[""].shared_input is not model.k.fp8[""].shared_input
    assert rows.slots["input", Phase.TRAINING].index is other.q.fp8[""].slots["input", Phase.TRAINING].index
    input_casts.clear()
    assert_same(train(other), train(model))
    assert input_casts["q.input"] == 2 * 3 * 2
    alone = copy.deepcopy(model.k)
    assert torch.equal(alone.eval()(x), model.k.eval()(x))
    other.to(torch.float64).float()
    assert all(getattr(other, name).fp8[""].slots["input", Phase.TRAINING].index.tolist() == [0] for name in MEMBERS)
