"""The version, where every layer can read it; the same as in pyproject.toml."""

__version__ = "0.1.0"
