"""The `jpaged` command: one module per subcommand.

Optional parts have their own commands: `jpaged.bench.cli`, `jpaged.plan.cli`, `jpaged.route.cli`,
`jpaged.inspector.cli`.

main.py            table of commands; parses the command line, runs one subcommand, reports errors
options.py         flags: derived from the options' definitions; API key and TLS of client commands
vllm_flags.py      flags of vLLM: table and translation
startup.py         startup messages on stderr
serve.py           serve
multihost.py       serve as one of several processes
demo.py            demo
generate.py        generate
batch.py           batch
health.py          health
convert.py         convert
server_process.py  a server as a child process
doctor.py          doctor: checks the installation and the effective settings
packages.py        doctor's check of packages, with the standard library alone
help.py            help, and the layout of help
completion.py      completion
"""
