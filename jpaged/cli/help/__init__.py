"""What the command line says of itself.

formatter.py   how help is laid out
action.py      --help, whole or of a group
command.py     help
parsers.py     the parsers of subcommands, and those that take their arguments late
completion.py  completion
"""
