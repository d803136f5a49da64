"""What a training step costs in bf16 and in FP8 on a GPU that is not at hand, estimated from the model's operators."""
