"""The version, readable without importing the whole package."""

__version__ = "0.6.0"
