"""FSDP in the three precisions, two processes on the CPU: what is stored, gathered and reduced, and in which dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lit import loader, make_trainer, seeded
from processes import run_script

from lightning_fp8 import Fp8Precision, scaling_state
from lightning_fp8.plugins import fsdp2_policy
from lightning_fp8.plugins.settings import PRECISIONS
from lightning_fp8.plugins.trainer import PLUGINS

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from lightning_fp8 import DtypeAudit, scaling_state
from lightning_fp8.plugins import fsdp2_policy
from lightning_fp8.plugins.trainer import PLUGINS
from lit import Regression, loader, make_trainer, seeded

api, precision, reduce_dtype = sys.argv[1:]
torch.set_num_threads(1)
gathered = set()


def watch(layer, args):
    gathered.add(layer.weight.dtype)


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(32.0).div(8))

    def forward(self, x):
        seen["frequencies"] = str(self.inv_freq.dtype)
        return torch.einsum("bi,i->bi", x, self.inv_freq.cos())


class Front(nn.Module):
    # a product with a parameter, of what was multiplied by buffers

    def __init__(self):
        super().__init__()
        self.rotation = Rotation()
        self.product = nn.Parameter(torch.eye(32))
        self.register_buffer("gain", torch.full((32,), 1.5))

    def forward(self, x):
        seen["gain"] = str(self.gain.dtype)
        return (self.rotation(x) * self.gain) @ self.product


seen = {{}}


class Encoder(Regression):
    def __init__(self):
        super().__init__()
        self.front = Front()
        self.encoder = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True)
        # its gradient on rank 0 is 1, on rank 1 2**-9: a sum in bf16 loses the latter
        self.probe = nn.Linear(32, 1, bias=False)

    def forward(self, x):
        return self.net(self.encoder(self.front(x)[:, None])[:, 0])

    def training_step(self, batch, batch_idx):
        share = 1.0 if dist.get_rank() == 0 else 2.0**-9
        loss = super().training_step(batch, batch_idx)
        return loss + self.probe(torch.full((1, 32), share, dtype=batch[0].dtype)).float().sum()

    def on_before_optimizer_step(self, optimizer):
        grad = self.probe.weight.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        self.probe_gradient = grad.float().flatten()[:1].clone() if grad is not None and grad.numel() else None

    def configure_model(self):
        if api == "fsdp2" and self.device_mesh is not None and not hasattr(self, "sharded"):
            self.sharded = True
            policy = fsdp2_policy(plugin)
            for part in (self.front, self.encoder, self.net, self.probe):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


ignored = {{"ignore_modules": ("probe",)}} if precision.startswith("fp8-") else {{}}
plugin = PLUGINS[precision](reduce_dtype=reduce_dtype, **ignored)
model = seeded(Encoder)
result = {{}}
if api == "fsdp2":
    model.encoder.linear1.register_forward_pre_hook(watch)
    audit = DtypeAudit(on_violation="raise")
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = make_trainer({path!r}, plugins=plugin, strategy=strategy, devices=2, max_epochs=2, callbacks=[audit])
    trainer.fit(model, loader(), loader())
    result["losses"] = torch.stack(model.losses)
    # the shards: after a forward without gradients torch leaves some of what was gathered in their place
    result["stored"] = sorted({{str(row.actual) for row in audit.report.rows if row.kind == "parameter"}})
    result["optimizer"] = sorted({{str(row.actual) for row in audit.report.rows if row.kind == "optimizer state"}})
    result["probe_gradient"] = model.probe_gradient
    result["val_loss"] = trainer.callback_metrics["val_loss"]
else:
    dist.init_process_group("gloo")
    config = plugin.mixed_precision_config
    plugin.convert_module(model)
    sharded = FullyShardedDataParallel(
        model, mixed_precision=config, device_id=torch.device("cpu"), use_orig_params=True
    )
    model.encoder.linear1.register_forward_pre_hook(watch)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    for x, y in list(loader())[dist.get_rank() :: 2] * 4:
        x = plugin.convert_input(x)
        with plugin.forward_context():
            loss = nn.functional.mse_loss(sharded(x).float(), y)
        loss.backward()
        if precision.startswith("fp8-"):
            scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad(), plugin.forward_context():
        sharded.eval()
        result["val_loss"] = nn.functional.mse_loss(sharded(x).float(), y)
    result["losses"] = torch.stack(losses)
    result["stored"] = sorted(str(p.dtype) for p in sharded.parameters())
result["buffers"] = seen
result["gathered"] = sorted(map(str, gathered))
torch.save(result, {path!r} + f"/rank{{dist.get_rank()}}.pt")
"""


def run(api: str, precision: str, reduce_dtype: str, path: Path) -> list[dict[str, Any]]:
    run_script(SCRIPT.format(path=str(path)), path, api, precision, reduce_dtype)
    return [torch.load(path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", PRECISIONS)
def test_lightnings_fsdp_strategy_on_a_gpu(precision: str, tmp_path: Path) -> None:
    """With a world size of 1 there is still a process group, a flat parameter and mixed precision."""
    model = seeded()
    trainer = make_trainer(tmp_path, precision=precision, strategy="fsdp", accelerator="cuda", devices=1, max_epochs=2)
    trainer.fit(model, loader(), loader())
    assert type(trainer.precision_plugin) is PLUGINS[precision]
    assert torch.isfinite(torch.stack(model.losses)).all()
    assert model.losses[-1] < model.losses[0]
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
    if precision.startswith("fp8-"):
        assert scaling_state(model).updates == 8
        assert (scaling_state(model).amax_history[0] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "reduce_dtype"),
    [("fp8-delayed", "float32"), ("fp8-block", "bfloat16"), ("bf16-mixed", "float32"), ("bf16-true", "float32")],
)
def test_fsdp2(precision: str, reduce_dtype: str, tmp_path: Path) -> None:
    first, second = run("fsdp2", precision, reduce_dtype, tmp_path)
    assert torch.stack([first["val_loss"], second["val_loss"]]).isfinite().all()
    assert not torch.equal(first["losses"], second["losses"])
    assert first["losses"][-2:].mean() < first["losses"][:2].mean()
    stored = "torch.bfloat16" if precision == "bf16-true" else "torch.float32"
    assert set(first["stored"]) == {stored}
    assert first["optimizer"] == [stored]
    assert first["gathered"] == ["torch.bfloat16"]
    assert first["buffers"] == {"frequencies": "torch.float32", "gain": stored}
    exact = (1 + 2**-9) / 2
    kept = reduce_dtype == "float32" and precision != "bf16-true"
    assert first["probe_gradient"].tolist() == [exact if kept else 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-true"])
def test_fsdp1(precision: str, tmp_path: Path) -> None:
    """torch's own wrapper with the plugin's configuration, because Lightning's strategy requires a GPU."""
    first, second = run("fsdp1", precision, "float32", tmp_path)
    assert not torch.equal(first["losses"], second["losses"])
    for rank in (first, second):
        assert rank["losses"][-2:].mean() < rank["losses"][:2].mean()
        assert rank["val_loss"].isfinite()
        assert rank["gathered"] == ["torch.bfloat16"]
        stored = "torch.bfloat16" if precision == "bf16-true" else "torch.float32"
        assert set(rank["stored"]) == {stored}
        assert rank["buffers"] == {"frequencies": "torch.float32", "gain": stored}


def test_compute_dtype_is_what_is_gathered() -> None:
    plugin = Fp8Precision(compute_dtype="float32")
    assert plugin.mixed_precision_config.param_dtype == torch.float32
    assert fsdp2_policy(plugin).param_dtype == torch.float32
    with pytest.raises(ValueError, match="`precision` must be a plugin or one of"):
        fsdp2_policy("fp8")  # type: ignore[arg-type]
