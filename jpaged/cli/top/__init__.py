"""The subcommand `top`: the pool of a running server in a terminal.

command.py its arguments, and which of three ways it shows what comes
stream.py  the frames of a server, over HTTP
figures.py what a frame comes to in numbers
screen.py  the pool drawn with half blocks, queues, what happens
keys.py    keys as they are pressed
"""
