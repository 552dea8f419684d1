"""The version, in its one place: every layer reads it here, and so does what builds the package."""

__version__ = "0.1.0"
