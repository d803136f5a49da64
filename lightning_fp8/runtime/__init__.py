"""Devices, settings of torch that threads share, and warnings that are given once."""
