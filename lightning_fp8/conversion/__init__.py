"""Decides which layers run in FP8 and why the others do not, and converts models."""
