"""The version, defined only here: read by every layer and by the package build."""

__version__ = "0.1.0"
