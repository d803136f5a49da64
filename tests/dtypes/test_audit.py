"""``audit`` and ``DtypeAudit``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lit import Regression, loader, make_trainer, seeded
from torch import nn

from lightning_fp8 import DtypeAudit
from lightning_fp8.dtypes import audit
from lightning_fp8.dtypes.report import buffer_dtypes_of
from lightning_fp8.plugins.trainer import PLUGINS


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def trained() -> tuple[nn.Sequential, dict[str, torch.dtype], torch.optim.Optimizer]:
    """The model after one step, the dtypes that its buffers had before, and its optimizer."""
    net = model()
    before = buffer_dtypes_of(net)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return net, before, optimizer


def test_rows_of_parameters_gradients_buffers_and_optimizer_state() -> None:
    net, before, optimizer = trained()
    report = audit(net, torch.float32, optimizers=[optimizer], buffer_dtypes=before)
    assert report.violations == ()
    kinds = [row.kind for row in report.rows]
    assert [kinds.count(kind) for kind in ("parameter", "gradient", "buffer", "optimizer state")] == [6, 6, 3, 12]
    assert sum(row.elements for row in report.rows if row.kind == "parameter") == 8 * 8 + 8 + 16 + 8 * 2 + 2
    lines = [line.split() for line in str(report).splitlines()]
    assert ["parameter", "float32", "float32", "6", "106", "424", "ok"] in lines
    assert ["buffer", "int64", "int64", "1", "1", "8", "ok"] in lines


def test_each_kind_of_violation_is_named() -> None:
    net, before, optimizer = trained()
    net[1].running_mean = net[1].running_mean.double()
    optimizer.state[net[0].weight]["exp_avg"] = optimizer.state[net[0].weight]["exp_avg"].bfloat16()
    net[2].weight.grad = None
    net[2].weight.data = net[2].weight.data.bfloat16()
    found = audit(net, torch.float32, optimizers=[optimizer], buffer_dtypes=before).violations
    assert [(row.kind, row.name, row.actual) for row in found] == [
        ("parameter", "2.weight", torch.bfloat16),
        ("buffer", "1.running_mean", torch.float64),
        ("optimizer state", "0.weight: exp_avg", torch.bfloat16),
    ]
    text = str(audit(net, torch.float32))
    assert "MISMATCH" in text
    assert "parameter 2.weight: expected float32, actual bfloat16" in text


def test_keep_fp32_and_nothing_expected() -> None:
    net = model().bfloat16()
    assert audit(net).violations == ()
    assert audit(net, torch.bfloat16).violations == ()
    assert [row.name for row in audit(net, torch.bfloat16, keep_fp32=("2",)).violations] == ["2.weight", "2.bias"]
    with pytest.raises(ValueError, match="`keep_fp32` pattern 'x' matches no module"):
        audit(net, keep_fp32=("x",))


def test_wider_optimizer_state_is_no_violation_and_long_lists_end() -> None:
    net = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    optimizer.state[net.weight]["momentum_buffer"] = torch.zeros(4, 4)
    assert audit(net, torch.bfloat16, optimizers=[optimizer]).violations == ()
    many = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)])
    assert str(audit(many, torch.bfloat16)).endswith("and 6 more")


class Encoder(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(self.encoder(x[:, None])[:, 0]))


@pytest.mark.parametrize("keep", [(), ("*.norm*",)])
@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_our_precisions_give_the_expected_dtypes(
    tmp_path: Path, precision: Any, keep: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    callback = DtypeAudit(on_violation="raise")
    plugin = PLUGINS[precision](keep_fp32=keep)
    trainer = make_trainer(tmp_path, plugins=plugin, callbacks=[callback], accumulate_grad_batches=2, max_epochs=2)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer.fit(seeded(Encoder), loader(), loader())
    report = callback.report
    assert report is not None
    assert {row.kind for row in report.rows} == {"parameter", "gradient", "buffer", "optimizer state"}
    assert len({(row.kind, row.name) for row in report.rows}) == len(report.rows)
    tables = [r.getMessage() for r in caplog.records if "after the first optimizer step:\nwhat" in r.getMessage()]
    assert len(tables) == 1
    found = {row.actual for row in report.rows if row.kind in ("parameter", "gradient", "optimizer state")}
    low = {torch.bfloat16} if precision == "bf16-true" else set()
    assert found == (low | {torch.float32} if keep or not low else low)
    assert {row.name: row.actual for row in report.rows}["table"] == (*low, torch.float32)[0]


@pytest.mark.parametrize("when", ["set-up", "first step"])
def test_a_mismatch_is_reported(tmp_path: Path, when: str) -> None:
    class Broken(Regression):
        def configure_optimizers(self) -> Any:
            if when == "set-up":
                self.net[2].weight.data = self.net[2].weight.data.bfloat16()
            return super().configure_optimizers()

        def on_train_batch_end(self, *args: Any) -> None:
            if when == "first step":
                state = self.optimizers().state[self.net[0].bias]
                state["exp_avg"] = state["exp_avg"].bfloat16()

    with pytest.raises(RuntimeError, match=r"fp8-delayed differ from those expected, after (set-up|the first)"):
        make_trainer(tmp_path, callbacks=[Late(on_violation="raise")]).fit(seeded(Broken), loader())
    with pytest.warns(UserWarning, match="differ from those expected"):
        make_trainer(tmp_path, callbacks=[Late()], max_steps=1).fit(seeded(Broken), loader())


class Late(DtypeAudit):
    """Audits after the module's own hook has run."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.on_train_batch_end(outputs, batch, batch_idx)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def test_under_lightnings_own_precision_it_only_lists(tmp_path: Path) -> None:
    callback = DtypeAudit(on_violation="raise")
    make_trainer(tmp_path, precision="64-true", callbacks=[callback], max_steps=1).fit(seeded(), loader())
    assert callback.report is not None
    assert {row.actual for row in callback.report.rows if row.kind == "parameter"} == {torch.float64}


def test_bad_word() -> None:
    with pytest.raises(ValueError, match="must be 'warn' or 'raise', got 'ignore'"):
        DtypeAudit(on_violation="ignore")  # type: ignore[arg-type]
