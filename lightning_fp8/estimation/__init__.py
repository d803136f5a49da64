"""Estimates what a training step costs in bf16 and in FP8 from the model's operators, without the GPU."""
