"""The CPU kernel of products: core.cc has the arithmetic, kernel.cc what is computed where."""
