"""The version, readable without importing the whole package."""

__version__ = "1.0.0"
