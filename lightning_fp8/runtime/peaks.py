"""The FP8 peak of a GPU according to its data sheet, looked up by the driver's name for the GPU."""

from __future__ import annotations

import re

# Dense FP8 TFLOP/s of one GPU, with fp32 accumulation, by a pattern of the device's whole name. NVIDIA's data sheets
# mostly state the peak with sparsity, which is twice the dense peak.
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
    """Dense FP8 peak of one GPU in FLOP/s, by the driver's name for it; None if the table does not have this GPU.

    >>> dense_fp8_flops("NVIDIA H100 PCIe") / 1e12
    1513.0
    """
    chip = name.lower().removeprefix("nvidia ")
    for pattern, tflops in _DENSE_FP8_TFLOPS.items():
        if re.fullmatch(pattern, chip):
            return tflops * 1e12
    return None
