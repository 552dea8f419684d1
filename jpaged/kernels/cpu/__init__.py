"""The C++ library of the CPU kernels, which XLA calls through its foreign functions.

build.py     the compiler's run
library.py   the library, loaded and registered
numbers.h    numbers as they are stored, one at a time
vector.h     vectors of the width that a core is compiled for
processor.h  what this processor has
tasks.h      the caller and XLA's threads at one call's tasks
"""
