"""Help of the command line.

formatter.py   layout of help
action.py      --help, whole or of a group
command.py     help
parsers.py     parsers of subcommands, and lazy parsers
completion.py  completion
"""
