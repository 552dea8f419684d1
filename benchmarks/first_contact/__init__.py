"""The first run on an accelerator: every check in a process with a time limit, and results that outlive a crash.

__main__.py   the command: run, pack or compare
driver.py     runs the checks one after the other, each as long as its limit allows
child.py      the process of one check
cells.py      the lines of a check's cells; programs that compile on threads
summary.py    the results as text
checks.py     the table of checks, most valuable first
"""
