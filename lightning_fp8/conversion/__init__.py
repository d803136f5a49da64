"""Which layers run in FP8, why the others do not, and how a model becomes one of FP8 layers."""
