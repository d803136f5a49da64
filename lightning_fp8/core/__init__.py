"""An FP8 linear layer: its page, the page's operators ``torch.ops.lightning_fp8.*``, and pages of the same form.

An FP8 tensor is passed as ``uint8`` codes and the name of its scaling, because torch's operator checks lack CPU kernels
for float8 inputs.
"""

from lightning_fp8.core import flops  # noqa: F401 - registers the FLOP formulas
