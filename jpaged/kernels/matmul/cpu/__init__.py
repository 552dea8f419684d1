"""The CPU kernel of matmuls: core.cc has the arithmetic, kernel.cc distributes the work."""
