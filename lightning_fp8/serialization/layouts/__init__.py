"""The layouts of FP8 checkpoints, one per file: how each is read and written.

A new layout is a file here, a line in :mod:`~lightning_fp8.serialization.layouts.registry`, and a row in the pages'
tables.
"""
