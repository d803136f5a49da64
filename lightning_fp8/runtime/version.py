"""The version, for what must not import the whole package."""

__version__ = "0.6.0"
