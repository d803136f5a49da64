"""The layouts of FP8 checkpoints, one a file: how each is read and how it is written."""
