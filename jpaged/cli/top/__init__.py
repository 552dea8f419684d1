"""The subcommand `top`: the KV pool of a running server in a terminal.

command.py its arguments, and the three output modes
stream.py  the frames of a server, over HTTP
figures.py numbers computed from a frame
screen.py  the pool drawn with half blocks, queues, events
keys.py    single key presses
"""
