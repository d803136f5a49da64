from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import slow_layers
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, seeded
from pairwise import pairwise
from processes import run_script
from slow_layers import BACKWARD, FORWARD, Sleep, Slow
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import LayerTimer, convert, describe, scaling_state
from lightning_fp8.callbacks import stopwatch
from lightning_fp8.callbacks.stopwatch import NOTHING_RAN, CudaClock, HostClock, Stopwatch, clock_for


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated clock, on which other load takes no time; other processes use the real clock."""
    told = slow_layers.ToldClock()
    for module in (slow_layers, stopwatch):
        monkeypatch.setattr(module, "time", told)


def timed(model: Regression, tmp_path: Path, every_n_steps: int = 2, **kwargs: Any) -> LayerTimer:
    """Times of the second step, as the first one includes one-time work of the process."""
    timer = LayerTimer(every_n_steps)
    make_trainer(tmp_path, callbacks=[timer], max_steps=2, **kwargs).fit(model, loader())
    return timer


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "32-true"])
def test_time_is_that_of_the_layer_that_takes_it(precision: str, tmp_path: Path) -> None:
    class Model(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.slow, self.behind = nn.Linear(32, 32), Slow(32, 32), nn.Linear(32, 32)
            self.parts = nn.ModuleList([nn.Linear(32, 32), Slow(32, 32), nn.Linear(32, 32)])

        def forward(self, x: Tensor) -> Tensor:
            # time between two layers, forward and backward, which belongs to neither
            x = Sleep.apply(self.before(x), BACKWARD, BACKWARD)
            x = self.behind(self.slow(self.slow(x)))
            # three layers that share an input, whose gradients are summed
            q, k, v = (part(x) for part in self.parts)
            return self.net(q * k + v)

    timer = timed(seeded(Model), tmp_path, precision=precision)
    assert set(timer.forward_ms) == set(timer.backward_ms)
    calls = {"slow": 2, "parts.1": 1}
    for path, forward in timer.forward_ms.items():
        sleeps = calls.get(path, 0)
        assert sleeps * FORWARD <= forward / 1e3 < (sleeps + 1) * FORWARD, path
        assert sleeps * BACKWARD <= timer.backward_ms[path] / 1e3 < (sleeps + 1) * BACKWARD, path
        assert forward > 0 < timer.backward_ms[path]
    assert set(timer.forward_ms) == {"before", "slow", "behind", "net.0", "net.2", *(f"parts.{i}" for i in range(3))}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_forward_work(reentrant: bool, tmp_path: Path) -> None:
    class Model(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.slow, self.last = nn.Linear(32, 32), Slow(32, 32), nn.Linear(32, 32)

        def block(self, x: Tensor) -> Tensor:
            # the backward nodes of `last` trigger the recomputation of all of this
            return self.last(Sleep.apply(self.slow(self.first(x)), BACKWARD, 0.0))

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.block, x.requires_grad_(), use_reentrant=reentrant)
            # the last saved tensor is needed in the middle of a layer, where recomputation stops
            return self.net(checkpoint(self.slow, x, use_reentrant=reentrant))

    timer = timed(seeded(Model), tmp_path)
    # two calls and two recomputations, except that the last half of a sleep may not be recomputed
    assert 3.5 * FORWARD <= timer.forward_ms["slow"] / 1e3 < 5 * FORWARD
    assert 2 * BACKWARD <= timer.backward_ms["slow"] / 1e3 < 3 * BACKWARD
    for path in ("first", "last"):
        assert 0 < timer.forward_ms[path] / 1e3 < FORWARD
        assert 0 < timer.backward_ms[path] / 1e3 < BACKWARD


class Mixed(Regression):
    """Layers that are shared, frozen, called twice, never called, called without gradients, and changed in place."""

    def __init__(self, wrap: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        # its feed-forward block is fused in other steps
        self.fused = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        names = ("first", "twice", "unused", "teacher", "frozen", "aside")
        self.layers = nn.ModuleDict({name: nn.Linear(32, 32) for name in names})
        self.both = nn.Bilinear(32, 32, 32)
        for name in ("first", "frozen"):
            self.layers[name].requires_grad_(False)
        self.wrap = wrap or (lambda function, x: function(x))
        self.gradients: list[Tensor] = []

    def blocks(self, x: Tensor) -> Tensor:
        return self.fused(self.encoder(x[:, None]))[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        layers = self.layers
        x = layers["first"](x)
        x += 1
        x = F.relu_(layers["twice"](x))
        x = layers["twice"](x).add_(1)
        # backward never reaches this layer
        layers["aside"](x)
        with torch.no_grad():
            taught = layers["teacher"](x)
        x = self.wrap(self.blocks, layers["frozen"](x + taught))
        return self.net(x + self.both(x.float(), x.float()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients += [p.grad.clone() for p in self.parameters() if p.grad is not None]


WRAPS: dict[str, Callable[..., Tensor] | None] = {
    "plain": None,
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "not reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
}


@pytest.mark.parametrize(
    ("precision", "wrap", "accumulate"), pairwise(["fp8-delayed", "bf16-mixed", "32-true"], list(WRAPS), [1, 2])
)
def test_training_is_not_touched(precision: str, wrap: str, accumulate: int, tmp_path: Path) -> None:
    runs, timer = [], LayerTimer(every_n_steps=1)
    for callbacks in ([], [timer]):
        model = seeded(Mixed, wrap=WRAPS[wrap])
        torch.manual_seed(3)
        trainer = make_trainer(
            tmp_path, callbacks=callbacks, precision=precision, accumulate_grad_batches=accumulate, max_epochs=2
        )
        trainer.fit(model, loader())
        runs.append([*model.losses, *model.gradients, *model.parameters(), torch.rand(3)])
        if precision == "fp8-delayed":
            state = scaling_state(model)
            runs[-1] += [state.scale, state.amax_history]
    assert len(runs[0]) == len(runs[1])
    assert all(map(torch.equal, *runs))
    paths = {row.path for row in describe(model)}
    # torch's own attention reads this layer's weight, and never calls the layer
    outputs = set() if precision == "fp8-delayed" else {f"{name}.self_attn.out_proj" for name in ("encoder", "fused")}
    assert set(timer.forward_ms) == paths - outputs - {"layers.unused"}
    without_backward = {"layers.first", "layers.teacher", "layers.aside"}
    assert set(timer.backward_ms) == set(timer.forward_ms) - without_backward
    assert min(*timer.forward_ms.values(), *timer.backward_ms.values()) > 0


def test_an_attention_includes_its_output_projection(tmp_path: Path) -> None:
    timer = timed(seeded(Mixed), tmp_path)
    for times in (timer.forward_ms, timer.backward_ms):
        assert times["encoder.self_attn"] > times["encoder.self_attn.out_proj"] > 0


class Ticking:
    """A clock that advances by one at each mark."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def wait(self) -> None:
        pass

    def milliseconds(self, start: int, end: int) -> float:
        return float(end - start)


def nodes_behind(output: Tensor, layer: nn.Module) -> int:
    """The number of autograd nodes, without those that accumulate gradients."""
    found, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found.add(node)
            waiting += [earlier for earlier, _ in node.next_functions]
    return len(found)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_node_counts_once(autocast: bool) -> None:
    layer, clock = nn.Linear(8, 8), Ticking()
    stopwatch = Stopwatch({"layer": layer}, clock)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # autocast casts the weight once for both calls
        y = layer(layer(torch.randn(2, 8)))
    expected = nodes_behind(y, layer)
    y.sum().backward()
    # nothing is marked between the start and the end of a node, nor inside a forward
    assert stopwatch.milliseconds() == [[2.0, float(expected)]]


def test_hooks_of_nodes_are_removed_as_well() -> None:
    layer, clock = nn.Linear(8, 8), Ticking()
    stopwatch = Stopwatch({"layer": layer, "other": nn.Linear(8, 8)}, clock)
    y = layer(torch.randn(2, 8)).sum()
    y.backward(retain_graph=True)
    before = stopwatch.milliseconds()
    stopwatch.remove_hooks()
    y.backward()
    layer(torch.randn(2, 8))
    assert stopwatch.milliseconds() == before
    assert before[1] == [NOTHING_RAN, NOTHING_RAN]
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_a_forward_that_fails_is_left_behind() -> None:
    layer = nn.Linear(8, 8)
    stopwatch = Stopwatch({"layer": layer}, Ticking())
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 7))
    layer(torch.randn(2, 8)).sum().backward()
    ((forward, backward),) = stopwatch.milliseconds()
    assert forward == 2.0
    assert backward > 0


def test_the_graph_is_not_kept_alive() -> None:
    class Witness:
        alive = True

        def __del__(self) -> None:
            Witness.alive = False

    layer = Slow(8, 8)
    stopwatch = Stopwatch({"layer": layer}, Ticking())
    y = layer(torch.randn(2, 8))
    y.grad_fn.metadata["witness"] = Witness()
    del y
    assert not Witness.alive
    assert stopwatch.milliseconds()[0][0] == 1.0


def test_on_a_gpu_times_are_those_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        """An event whose time in milliseconds is the number of events recorded so far."""

        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")
            self.at = calls.count("record")

        def elapsed_time(self, other: Event) -> float:
            assert calls[-1] == "synchronize", "nothing is known before"
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    stopwatch = Stopwatch({"0": model[0], "1": model[1]}, clock_for(torch.device("cuda", 0)))
    y = model(torch.randn(2, 16))
    expected = nodes_behind(y, model)
    y.sum().backward()
    (forward, backward), (forward_1, backward_1) = stopwatch.milliseconds()
    assert calls.count("synchronize") == 1
    assert forward == forward_1 == 1.0
    assert backward + backward_1 == expected
    assert isinstance(clock_for(torch.device("cuda")), CudaClock)
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_logs_milliseconds_of_due_steps(tmp_path: Path) -> None:
    logger, timer = CSVLogger(tmp_path), LayerTimer(every_n_steps=2)
    make_trainer(tmp_path, logger=logger, callbacks=[timer]).fit(seeded(), loader())
    logged = [row for row in rows(logger) if row.get("timing/net.0/forward_ms")]
    assert [int(row["step"]) for row in logged] == [1, 3]  # Lightning counts from 0
    keys = {f"timing/{path}/{name}" for path in ("net.0", "net.2") for name in ("forward_ms", "backward_ms")}
    assert {key for key in logged[-1] if key.startswith("timing")} == keys
    for path in ("net.0", "net.2"):
        assert float(logged[-1][f"timing/{path}/forward_ms"]) == timer.forward_ms[path]
        assert float(logged[-1][f"timing/{path}/backward_ms"]) == timer.backward_ms[path]
    assert timer.forward_ms["net.0"] != float(logged[0]["timing/net.0/forward_ms"])


class Watching(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.watched: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.watched.append(bool(self.net[0]._forward_hooks or self.net[0]._forward_pre_hooks))
        return super().training_step(batch, batch_idx)


def test_it_watches_due_steps_only_and_leaves_no_hook(tmp_path: Path) -> None:
    model = seeded(Watching)
    timer = LayerTimer(every_n_steps=3)
    make_trainer(tmp_path, callbacks=[timer], accumulate_grad_batches=2).fit(model, loader(rows=16 * 12))
    # the first micro-batch of steps 3 and 6
    assert [batch for batch, on in enumerate(model.watched) if on] == [4, 10]
    assert not model.net[0]._forward_hooks
    assert not model.net[0]._forward_pre_hooks


def test_a_batch_that_the_model_skips_leaves_no_hook(tmp_path: Path) -> None:
    class Skipping(Watching):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    model = seeded(Skipping)
    # returning this ends the epoch before the second step is made
    make_trainer(tmp_path, callbacks=[LayerTimer(every_n_steps=2)], max_epochs=2).fit(model, loader())
    assert model.watched == [False, False]
    assert not model.net[0]._forward_hooks


def test_two_optimizers_in_one_batch(tmp_path: Path) -> None:
    class Two(Watching):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.net[0], self.net[2])]

    model = seeded(Two)
    make_trainer(tmp_path, callbacks=[LayerTimer(every_n_steps=4)]).fit(model, loader(rows=16 * 6))
    # steps 4, 8 and 12 are made in these batches
    assert [batch for batch, on in enumerate(model.watched) if on] == [1, 3, 5]


@pytest.mark.parametrize("where", ["step", "backward"])
def test_an_exception_leaves_no_hook(where: str, tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if where == "step":
                raise ZeroDivisionError
            loss.register_hook(lambda gradient: 1 / 0)
            return loss

    model = seeded(Failing)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, callbacks=[LayerTimer(1)]).fit(model, loader())
    assert not model.net[0]._forward_hooks
    assert not model.net[0]._forward_pre_hooks


def test_a_compiled_model_is_named_and_keeps_no_hook(tmp_path: Path) -> None:
    class Compiled(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return self.compiled(x)

        def configure_model(self) -> None:
            # without the name under which a module in an attribute would be called
            self.compiled = lambda x: self.graph[0](x)
            self.graph = (torch.compile(self.net, fullgraph=True, backend="eager"),)

    runs = []
    for cls in (Regression, Compiled):
        torch._dynamo.reset()
        model, timer = seeded(cls), LayerTimer(1)
        trainer = make_trainer(tmp_path, callbacks=[timer])
        if cls is Compiled:
            with pytest.warns(UserWarning, match=r"no layer was called.*torch\.compile") as caught:
                trainer.fit(model, loader())
            assert sum("LayerTimer" in str(warning.message) for warning in caught) == 1
            assert timer.forward_ms == {}
        else:
            trainer.fit(model, loader())
        runs.append(model.losses)
    assert all(map(torch.equal, *runs))


def test_a_model_without_layers_and_bad_input(tmp_path: Path) -> None:
    class Nothing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[:, :16]

    with pytest.warns(UserWarning, match="no layer of the model does matrix multiplications"):
        timed(seeded(Nothing), tmp_path, precision="32-true")
    with pytest.raises(ValueError, match=r"LayerTimer: `every_n_steps` must be at least 1, got 0\."):
        LayerTimer(every_n_steps=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_are_not_timed(tmp_path: Path) -> None:
    model = seeded()
    model.net.append(torch.jit.script(nn.Linear(16, 16)))
    assert list(timed(model, tmp_path).forward_ms) == ["net.0", "net.2"]


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from lit import Regression, loader, make_trainer, seeded
from slow_layers import Slow
from lightning_fp8 import LayerTimer

class Uneven(Regression):
    def __init__(self):
        super().__init__()
        self.slow, self.only_one, self.neither = Slow(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = (self.slow if dist.get_rank() else nn.Identity())(x.requires_grad_())
        return self.net(x if dist.get_rank() else self.only_one(x))

torch.set_num_threads(1)
timer = LayerTimer(every_n_steps=2)
strategy = "ddp_find_unused_parameters_true"
trainer = make_trainer({path!r}, strategy=strategy, devices=2, callbacks=[timer])
trainer.fit(seeded(Uneven), loader())
torch.save([timer.forward_ms, timer.backward_ms], {path!r} + f"/rank{{dist.get_rank()}}.pt")
"""


@pytest.mark.slow
def test_times_are_the_slowest_process(tmp_path: Path) -> None:
    run_script(SCRIPT.format(path=str(tmp_path)), tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first == second
    for times, sleep in zip(first, (FORWARD, BACKWARD), strict=True):
        # each of the first two layers ran on only one of the ranks
        assert set(times) == {"net.0", "net.2", "slow", "only_one"}
        assert times["slow"] / 1e3 >= sleep > times["only_one"] / 1e3
