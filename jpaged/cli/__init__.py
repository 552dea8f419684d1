"""The `jpaged` command: one module per subcommand.

main.py            parses the command line, runs one subcommand, reports errors
options.py         flags, derived from the options' definitions
access.py          flags for an API key and TLS, for client commands
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
bench/             bench, one module per benchmark
doctor/            doctor: checks the installation and the effective settings
top/               top: the KV pool of a server, in a terminal
help/              help and completion, and the layout of help
"""
