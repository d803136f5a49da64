"""The known feed-forward blocks, by the source of the method that computes them.

The source is the key, not the name of the class: more than a hundred classes of transformers, and copies of them, have
the MLP of Llama word for word. This is safe, because none of these methods reads outside names: its result depends only
on its argument and on the modules that it calls. Before a block runs fused, its linear layers, the activation and the
dropouts between them are checked; all other modules are called unchanged.

A method that has changed, or that a subclass overrides, has another source. Such a block runs its class's own code.

The table has torch's layers, the blocks that the models of transformers 5.0 to 5.24 repeat in their layers, and the
projectors that several of them share; not heads, which run once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.known_source import source_digest

# torch's transformer layers compute the block in `_ff_block`, BERT's in `feed_forward_chunk`
_METHODS = ("forward", "_ff_block", "feed_forward_chunk")


class Form(NamedTuple):
    """How a known class computes its feed-forward block.

    Attributes:
        kind: ``"sequential"``; ``"chain"``, modules one after the other; ``"gated"``; ``"packed"``, which is gated with
            one layer for gate and up; or ``"two modules"``.
        method: the method that computes the block.
        paths: the parts that the method calls. For a chain, in call order; for any other block, the last layer, the
            activation, and the first layer, or gate and up.
        around: for two modules, their names, in call order.
        classes: for two modules, their classes.
        behind: for two modules, the dropout after the block, and the norm after the residual sum.
    """

    kind: str
    method: str
    paths: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    classes: tuple[type[nn.Module], ...] = ()
    behind: tuple[str, ...] = ()


# the modules that `forward` calls, in order; the comment names a class with this forward, of transformers by default
_CHAINS = {
    "053b3b9c3008c54a": "fc1 activation_fn fc2",  # CLIPMLP
    # HubertFeedForward
    "d0e0813b41d5b48c": "intermediate_dense intermediate_act_fn intermediate_dropout output_dense output_dropout",
    "dbd024ef7f3576e1": "up_proj act_fn down_proj",  # NemotronMLP
    "1686b4446f5fbbe6": "linear_fc1 act_fn linear_fc2",  # CohereCompassVisionMLP
    "d28105f43e2c4d5c": "lin1 act lin2",  # SamMLPBlock
    "bc13472aa90d7d09": "linear_1 act linear_2",  # AudioFlamingo3MultiModalProjector
    "fce9668f29e2edb0": "linear_1 act linear_2",  # LlavaMultiModalProjector
    "b1bae0624cf15019": "c_fc act c_proj dropout",  # GPT2MLP
    "bcf4fe6855ddd15f": "fc1 act fc2",  # Ernie4_5VLVisionMLP
    "1929cbbc20100e27": "layer_norm linear_1 act linear_2",  # InternVLMultiModalProjector
    "4d0840ee29ac0456": "fc1 activation drop fc2 drop",  # FocalNetMlp
    "b976a7d02061c563": "norm linear_1 act_fn linear_2",  # HubertAttnAdapterLayer
    "0c114691f4d3da7a": "fc1 activation fc2",  # Dinov2MLP
    "1bb918b065ff7522": "norm fc1 activation fc2",  # Dots3NoteAudioAdapter
    "7ecbd2c6dedf22bc": "pre_norm up_proj silu dropout down_proj dropout",  # GraniteSpeechConformerFeedForward
    "90e139b3a3223380": "fc1 act drop fc2 drop",  # VitDetMlp
    "956b5d741cf37b55": "fc_in act fc_out dropout",  # CodeGenMLP
    "b0db8d7f36767fb7": "dense_h_to_4h act dense_4h_to_h",  # GPTNeoXMLP
    "e51dc03d2b463da7": "linear1 activation linear2",  # VibeVoiceAcousticTokenizerFeedForward
    "1d3c58aafbfeca84": "fc1 act drop fc2 drop",  # MgpstrMlp
    "330a6338236e9b1d": "dense1 intermediate_act_fn dense2",  # PerceiverMLP
    "3bc0aa7696115cfd": "in_proj gelu out_proj dropout",  # BarkMLP
    "3e2c10cac2286a3b": "up_proj act_fn dropout down_proj",  # EdgeTamVideoMemoryAttentionMLP
    "4985eca77bab853f": "norm fc1 act_fn fc2 act_fn out_proj",  # ZayaRouterMLP
    "546eea457c0dfef6": "dense1 intermediate_act_fn dropout dense2 dropout",  # PvtFFN
    "54fb723863319491": "dense_h_to_4h act dense_4h_to_h",  # GPTNeoXJapaneseMLP
    "58f52ad3a941bd36": "fc1 act_fn fc2",  # GlmAsrMLP
    "7399f2976f27a50f": "fc1 activation fc2 layer_norm",  # EfficientLoFTRMLP
    "89252dd6433b117e": "fc1 act_fn fc2 ln",  # Ernie4_5_VLMoeVisionMLP
    "8fce4175f47e082c": "fc1 activation_fn dropout1 fc2 dropout2",  # JanusVisionMLP
    "9af452c10ebd4b18": "linear1 activation dropout linear2",  # OmDetTurboMLPWithDropout
    "9df6a755a9314721": "dense1 adapter_act_fn dense2",  # XmodAdapter
    "bd0be7cffd838a91": "layer_norm up_proj act_fn down_proj",  # EdgeTamVideoPerceiverMLP
    "d701d91dcb0ab3b8": "dense_h_to_4h act dense_4h_to_h",  # FalconMLP
    "f8df42c67bcc711f": "c_fc act c_proj dropout",  # OpenAI GPT's MLP
    "a3f6c979cf216d16": "c_fc gelu c_proj dropout",  # nanoGPT's MLP
}
# `down(act(gate(x)) * up(x))`
_GATED = {
    "3207067cd7c8e85c": "down_proj act_fn gate_proj up_proj",  # LlamaMLP
    "9d5d13f7d73c69ed": "down_proj act_fn gate_proj up_proj",  # Glm4VisionMlp
    "b9d607cd5cd3b1ec": "down_proj act_fn gate_proj up_proj",  # IdeficsMLP
    "b5bcf83109d98a0a": "down_proj act_fn gate_proj up_proj",  # RecurrentGemmaMlp
    "3a26b83dda6f123f": "down_proj activation_fn gate_proj up_proj",  # Llama4TextMLP
}
# the layer calls `intermediate` and `output`, which call the parts
_BERT = Form(
    "two modules",
    "feed_forward_chunk",
    ("output.dense", "intermediate.intermediate_act_fn", "intermediate.dense"),
    around=("intermediate", "output"),
)
_INTERMEDIATE = "d14a78adc4a6719c"
# the name of the norm
_OUTPUTS = {"9ddcc3eb06d0f28f": "LayerNorm", "39c9a9ebc620b8c7": "norm"}

_FORMS = {
    **{digest: Form("chain", "forward", tuple(names.split())) for digest, names in _CHAINS.items()},
    **{digest: Form("gated", "forward", tuple(names.split())) for digest, names in _GATED.items()},
    # Phi3MLP
    "6ef9348be261ca79": Form("packed", "forward", ("down_proj", "activation_fn", "gate_up_proj")),
    # nn.TransformerEncoderLayer and nn.TransformerDecoderLayer
    "b36d468f2b627def": Form("chain", "_ff_block", ("linear1", "activation", "dropout", "linear2", "dropout2")),
    "e5e517b2c48afded": Form("chain", "_ff_block", ("linear1", "activation", "dropout", "linear2", "dropout3")),
    # BertLayer, FNetLayer
    "6ca42ab02be7d188": _BERT,
    "79b72cd8e7e305a7": _BERT,
}


def form_of_class(kind: type[nn.Module], classes: Mapping[str, type[nn.Module]]) -> Form | None:
    """How a class computes its feed-forward block; None if that is not known exactly.

    Args:
        kind: the class.
        classes: the classes of its modules, by name.
    """
    # A class that acts when it is subclassed, or has a metaclass, is left alone. Exceptions are the layers of
    # transformers: they wrap their forward when subclassed, and support that, as `fully_shard` subclasses, too.
    acting = (base for base in kind.__mro__[:-1] if "__init_subclass__" in vars(base))
    if type(kind) is not type or any(base.__module__ != "transformers.modeling_layers" for base in acting):
        return None
    if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Form("sequential", "forward")
    for method in _METHODS:
        form = _FORMS.get(source_digest(getattr(kind, method, None)))
        # a class may have a known function under another name
        if form is not None and form.method == method:
            return _of_two_modules(classes) if form is _BERT else form
    return None


def _of_two_modules(classes: Mapping[str, type[nn.Module]]) -> Form | None:
    inner, outer = (classes.get(name, nn.Module) for name in _BERT.around)
    norm = _OUTPUTS.get(source_digest(outer.forward))
    if source_digest(inner.forward) != _INTERMEDIATE or norm is None:
        return None
    return _BERT._replace(classes=(inner, outer), behind=("output.dropout", f"output.{norm}"))


def known_form(module: nn.Module, kind: type[nn.Module]) -> Form | None:
    """The form of one of a module's classes, if the module has the parts that its method calls."""
    classes = {name: own_class(part) for name, part in module._modules.items() if part is not None}
    form = form_of_class(kind, classes)
    return form if form is not None and all(_has(module, path) for path in form.paths) else None


def _has(module: nn.Module, path: str) -> bool:
    *owner, name = path.split(".")
    return hasattr(part_at(module, ".".join(owner)) if owner else module, name)


def part_at(module: Any, path: str) -> Any:
    """The part of a module at a path inside it."""
    for name in path.split("."):
        module = getattr(module, name)
    return module
