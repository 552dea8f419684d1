"""The `jpaged` command: one module a subcommand, and `main` which puts them together."""
