"""Small random models of ``transformers`` and ``x-transformers``, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers
import x_transformers as xt
from torch import Tensor, nn

Batch = dict[str, Tensor]
VOCABULARY = 96


class Wrapped(pl.LightningModule):
    """Records its losses, and the parameters whose gradient was missing or not finite."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []
        self.validation_losses: list[float] = []
        self.bad_gradients: set[str] = set()

    def logits(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        for name, p in self.named_parameters():
            if p.requires_grad and (p.grad is None or not p.grad.isfinite().all()):
                self.bad_gradients.add(name)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.validation_losses.append(loss.item())
        self.log("val_loss", loss)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.logits(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class HuggingFace(Wrapped):
    def logits(self, batch: Batch) -> Tensor:
        return self.net(**batch).logits

    def loss(self, batch: Batch) -> Tensor:
        return self.net(**batch).loss


class XTransformer(Wrapped):
    def logits(self, batch: Batch) -> Tensor:
        return self.net(batch["x"], mask=batch["mask"])

    def loss(self, batch: Batch) -> Tensor:
        logits, target = self.logits(batch), batch["target"]
        if target.is_floating_point():
            return F.mse_loss(logits[batch["mask"]].float(), target[batch["mask"]].float())
        return F.cross_entropy(logits.transpose(1, 2), target)


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (4, length))


def padded(side: str) -> Batch:
    """Token ids of several lengths, padded on one side, as from a tokenizer and its collator."""
    lengths = torch.tensor([12, 9, 12, 5])
    places = torch.arange(12).expand(4, 12)
    mask = (places < lengths[:, None]) if side == "right" else (places >= 12 - lengths[:, None])
    ids = tokens().masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), padded("left")


def llama() -> tuple[nn.Module, Batch]:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), padded("left")


def bert() -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), padded("right")


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(10, (8,))}
    return transformers.ViTForImageClassification(config), batch


def t5() -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {**padded("right"), "labels": tokens(7)}


def whisper() -> tuple[nn.Module, Batch]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=16, max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": torch.randn(4, 16, 32), "labels": tokens()}
    return transformers.WhisperForConditionalGeneration(config), batch


def padding_mask() -> Tensor:
    return torch.arange(12) < torch.tensor([12, 9, 12, 5])[:, None]


def continuous(**kwargs: Any) -> tuple[nn.Module, Batch]:
    layers = xt.Encoder(dim=32, depth=2, heads=2, attn_dim_head=16, **kwargs)
    net = xt.ContinuousTransformerWrapper(dim_in=12, dim_out=8, max_seq_len=16, attn_layers=layers)
    x = torch.randn(4, 12, 12)
    return net, {"x": x, "mask": padding_mask(), "target": torch.sin(2 * x[..., :8])}


def of_tokens(layers: type[nn.Module], **kwargs: Any) -> tuple[nn.Module, Batch]:
    blocks = layers(dim=32, depth=2, heads=2, attn_dim_head=64, **kwargs)
    net = xt.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=blocks)
    ids, mask = torch.randint(VOCABULARY, (4, 13)), padding_mask()
    target = (ids[:, 1:] if layers is xt.Decoder else ids[:, :-1]).masked_fill(~mask, -100)
    return net, {"x": ids[:, :-1], "mask": mask, "target": target}


def made(name: str) -> tuple[Wrapped, Batch]:
    """The model of this name, always with the same weights and batch."""
    torch.manual_seed(3)
    net, batch = MODELS[name]()
    return (HuggingFace if name in HUGGING_FACE else XTransformer)(net), batch


Maker = Callable[[], tuple[nn.Module, Batch]]
HUGGING_FACE: dict[str, Maker] = {make.__name__: make for make in (gpt2, llama, bert, vit, t5, whisper)}
X_TRANSFORMERS: dict[str, Maker] = {
    "continuous-encoder": continuous,
    "encoder": lambda: of_tokens(xt.Encoder),
    "decoder": lambda: of_tokens(xt.Decoder),
    "decoder-rotary-flash": lambda: of_tokens(xt.Decoder, rotary_pos_emb=True, attn_flash=True),
    "decoder-alibi-flash": lambda: of_tokens(xt.Decoder, alibi_pos_bias=True, attn_flash=True),
    "decoder-rmsnorm-swiglu": lambda: of_tokens(
        xt.Decoder,
        rotary_pos_emb=True,
        attn_flash=True,
        attn_qk_norm=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
    ),
}
MODELS = {**HUGGING_FACE, **X_TRANSFORMERS}
