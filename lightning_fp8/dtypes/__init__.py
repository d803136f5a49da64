"""Dtype handling for stored parameters, layer inputs, attention operands and the evaluation of an encoder."""
