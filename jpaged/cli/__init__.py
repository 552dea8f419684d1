"""The `jpaged` command: one module a subcommand.

main.py            reads the command line, runs one subcommand, shows errors
options.py         flags, read off the options' definitions
access.py          flags for a key and for TLS, of commands that are clients
startup.py         what start-up says on stderr
serve.py           serve
route.py           route
multihost.py       serve, where it is one of several processes
demo.py            demo
generate.py        generate
batch.py           batch
health.py          health
convert.py         convert
plan.py            plan
server_process.py  a server as a child process

bench/             bench, a module a benchmark
doctor/            doctor: what is here, and what would be used
top/               top: the pool of a server, in a terminal
help/              help and completion, and how help is laid out
"""
