"""The `jpaged` command: one module per subcommand.

main.py            table of commands; parses the command line, runs one subcommand, reports errors
options.py         flags: derived from the options' definitions; API key and TLS of client commands
startup.py         startup messages on stderr
serve.py           serve
route.py           route
multihost.py       serve as one of several processes
demo.py            demo
generate.py        generate
batch.py           batch
health.py          health
convert.py         convert
plan.py            plan
server_process.py  a server as a child process
top.py             top: the KV pool of a server, in a terminal
top_screen.py      the pool drawn in a terminal: frames, numbers, key presses
doctor.py          doctor: checks the installation and the effective settings
packages.py        doctor's check of packages, with the standard library alone
doctor_child.py    doctor's process for checks that may hang or crash
help.py            help, and the layout of help
completion.py      completion
bench/             bench, one module per benchmark
"""
