"""Dtype handling for stored parameters, layer inputs, attention operands and the evaluation of an encoder."""

from lightning_fp8.dtypes.report import audit

__all__ = ["audit"]
