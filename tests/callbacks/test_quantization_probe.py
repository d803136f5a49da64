from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, seeded
from logged_runs import rows_of
from sqnr import sqnr
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import QuantizationProbe, ScaleFactorLogger, scaling_state
from lightning_fp8.modules import Fp8Linear


class Encoder(Regression):
    """A transformer layer first; ``dropout`` also applies to its attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.encoder(x[:, None])[:, 0])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_is_not_touched(dropout: float, tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [QuantizationProbe(every_n_steps=1)]):
        model = seeded(Encoder, dropout=dropout)
        torch.manual_seed(3)
        make_trainer(tmp_path, callbacks=callbacks).fit(model, loader())
        state = scaling_state(model)
        runs.append([*model.losses, *model.parameters(), state.scale, state.amax_history, torch.rand(3)])
    assert all(map(torch.equal, *runs))


def test_numbers_are_those_of_the_layer_itself(tmp_path: Path) -> None:
    expected: list[float] = []

    class Watched(Regression):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self.net[0]
            if self.training:
                with torch.no_grad():
                    in_bf16 = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
                    expected.append(sqnr(Fp8Linear.forward(layer, x), in_bf16))
            return super().forward(x)

    logger, probe = CSVLogger(tmp_path), QuantizationProbe(every_n_steps=2)
    make_trainer(tmp_path, logger=logger, callbacks=[probe]).fit(seeded(Watched), loader())
    logged = [float(row["fp8/net.0/sqnr_db"]) for row in rows_of(logger) if row.get("fp8/net.0/sqnr_db")]
    # the second and the fourth step; the first use of a tensor has the scale of its own amax, as in this reference
    assert logged == pytest.approx([expected[1], expected[3]], abs=1e-3)
    assert 24 < min(logged) < max(logged) < 36
    assert probe.sqnr_db["net.0"] == logged[-1]
    assert set(probe.sqnr_db) == {"net.0", "net.2"}


def test_an_attention_with_dropout_is_compared_without(tmp_path: Path) -> None:
    probe = QuantizationProbe(every_n_steps=4)
    model = seeded(Encoder, dropout=0.5)
    make_trainer(tmp_path, callbacks=[probe]).fit(model, loader())
    names = {
        "net.0",
        "net.2",
        *(f"encoder.{name}" for name in ("self_attn", "self_attn.out_proj", "linear1", "linear2")),
    }
    assert set(probe.sqnr_db) == names
    # with different dropout masks the two runs would differ by about 0 dB
    assert min(probe.sqnr_db.values()) > 15
    assert model.encoder.self_attn.dropout == 0.5


def test_the_layer_that_fp8_costs_most_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Wild(Regression):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.net[1](self.net[0](x))
            # one huge element: all others are far below the range of E4M3, and the product depends on them
            return self.net[2](torch.cat([hidden[:, :-1], torch.full_like(hidden[:, -1:], 3e5)], dim=1))

    model = seeded(Wild)
    with torch.no_grad():
        model.net[2].weight[:, -1] = 0
    probe = QuantizationProbe(every_n_steps=1)
    with pytest.raises(RuntimeError, match="nothing has been probed yet"):
        probe.suggest_ignore_modules()
    make_trainer(tmp_path, callbacks=[probe], max_steps=1).fit(model, loader())
    assert probe.sqnr_db["net.2"] < 10 < 20 < probe.sqnr_db["net.0"]
    with caplog.at_level(logging.INFO):
        assert probe.suggest_ignore_modules() == ["net.2"]
    assert f'      ignore_modules:\n        - "net.2"  # {probe.sqnr_db["net.2"]:.1f} dB' in caplog.text
    with caplog.at_level(logging.INFO):
        assert probe.suggest_ignore_modules(below_db=-50) == []
    assert "No layer is below -50.0 dB; the lowest has" in caplog.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_compared_again(reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(Regression):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=reentrant)

    results = []
    for cls in (Regression, Checkpointed):
        probe = QuantizationProbe(every_n_steps=4)
        make_trainer(tmp_path, callbacks=[probe]).fit(seeded(cls), loader())
        results.append(probe.sqnr_db)
    assert results[0] == pytest.approx(results[1], abs=1e-9)
    assert set(results[0]) == {"net.0", "net.2"}


def test_it_probes_due_steps_only_and_leaves_no_hook(tmp_path: Path) -> None:
    probed: list[bool] = []

    class Watching(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            probed.append(bool(self.net[0]._forward_hooks))
            return super().training_step(batch, batch_idx)

    model = seeded(Watching)
    trainer = make_trainer(tmp_path, callbacks=[QuantizationProbe(every_n_steps=3)], accumulate_grad_batches=2)
    trainer.fit(model, loader(rows=16 * 12))
    # the first micro-batch of steps 3 and 6
    assert [batch for batch, on in enumerate(probed) if on] == [4, 10]
    assert not model.net[0]._forward_hooks


def test_a_compiled_model_is_named(tmp_path: Path) -> None:
    class Compiled(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.compiled(x).float(), y)

        def configure_model(self) -> None:
            self.compiled = lambda x: F.linear(x, self.net[0].weight)[:, :16]

    with pytest.warns(UserWarning, match=r"no converted layer was called.*torch\.compile"):
        make_trainer(tmp_path, callbacks=[QuantizationProbe(1)], max_steps=1).fit(seeded(Compiled), loader())


def test_two_optimizers_in_one_batch(tmp_path: Path) -> None:
    class Two(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.step(batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.net[0], self.net[2])]

    logger = CSVLogger(tmp_path)
    callbacks = [QuantizationProbe(4), ScaleFactorLogger(4)]
    make_trainer(tmp_path, callbacks=callbacks, logger=logger).fit(seeded(Two), loader(rows=16 * 6))
    # the optimizer steps 4, 8 and 12 are made in the second, fourth and sixth batch
    for key in ("fp8/net.0/sqnr_db", "fp8/net.0.input/scale"):
        assert [int(row["step"]) for row in rows_of(logger) if row.get(key)] == [1, 3, 5], key
