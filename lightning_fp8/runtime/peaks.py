"""The FP8 peak of a GPU, from its data sheet, by the name that its driver gives."""

from __future__ import annotations

import re

# Dense FP8 with fp32 accumulation, TFLOP/s of one GPU, by a pattern of the device's whole name. NVIDIA's data sheets
# mostly print the number with sparsity, which is twice this.
_DENSE_FP8_TFLOPS = {
    # "NVIDIA H100 Tensor Core GPU" data sheet: SXM 3,958 with sparsity, PCIe 3,026, NVL 3,341
    r"h100 (\d+gb )?hbm3|h100 sxm5?( \d+gb)?": 1979.0,
    r"h100 pcie|h100 (\d+gb )?hbm2e": 1513.0,
    r"h100 nvl": 1671.0,
    # "NVIDIA H200 Tensor Core GPU" data sheet: SXM 3,958 with sparsity, NVL 3,341
    r"h200( sxm5?)?": 1979.0,
    r"h200 nvl": 1671.0,
    # "NVIDIA GH200 Grace Hopper Superchip" data sheet: 3,958 with sparsity
    r"gh200( \d+gb?( hbm3e?)?)?": 1979.0,
    # "NVIDIA DGX B200" data sheet: 72 PFLOP/s with sparsity for eight GPUs
    r"b200": 4500.0,
    # "NVIDIA GB200 NVL72" data sheet: 720 PFLOP/s with sparsity for 72 GPUs
    r"gb200": 5000.0,
    # "NVIDIA L4 Tensor Core GPU" data sheet: 485 with sparsity
    r"l4": 242.0,
    # "NVIDIA L40 GPU" and "NVIDIA L40S GPU" data sheets: 362 and 733, with sparsity 724 and 1,466
    r"l40": 362.0,
    r"l40s": 733.0,
    # "NVIDIA RTX 6000 Ada Generation" data sheet: 1,457 with sparsity
    r"rtx 6000 ada generation": 728.5,
    # "NVIDIA Ada GPU Architecture" whitepaper, appendix A: with fp16 accumulation 660.6 and 389.9
    r"geforce rtx 4090": 330.3,
    r"geforce rtx 4080": 194.9,
}


def dense_fp8_flops(name: str) -> float | None:
    """Dense FP8 peak in FLOP/s of one GPU, by the name that its driver gives; None for one that is not in the table.

    >>> dense_fp8_flops("NVIDIA H100 PCIe") / 1e12
    1513.0
    """
    chip = name.lower().removeprefix("nvidia ")
    for pattern, tflops in _DENSE_FP8_TFLOPS.items():
        if re.fullmatch(pattern, chip):
            return tflops * 1e12
    return None
