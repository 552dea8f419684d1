"""The subcommand `doctor`, one module per kind of finding.

command.py    the command, and the output of findings
finding.py    one finding
packages.py   Python, required packages and optional ones
machine.py    the cache, limits, ports, files of options, other processes
devices.py    devices, kernels and the model, checked by a child process
child.py      that process: hangs and crashes happen there
"""
