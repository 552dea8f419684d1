"""The subcommand `doctor`, a file a kind of finding.

command.py    the command, and how findings look
finding.py    what one finding is
packages.py   Python, what jpaged requires, and what it can do with more
machine.py    the cache, limits, ports, files that options name, other processes
devices.py    devices, kernels and the model: what a child process finds out
child.py      that process: whatever hangs or crashes does so there
"""
