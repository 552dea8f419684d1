"""The CPU kernel of matmuls: core.cc has the arithmetic, kernel.cc the tasks, stored.cc packs blocks of files."""
