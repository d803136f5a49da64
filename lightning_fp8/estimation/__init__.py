"""What a training step costs in bf16 and in FP8 on a GPU that is not at hand: an estimate, from the model's operators."""
