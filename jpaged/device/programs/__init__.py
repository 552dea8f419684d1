"""The closed list of programs: lowered, compiled, kept on disk, and what memory they take.

lowering.py        what a server runs on a mesh, as shapes
compile.py         the list, its compile cache, the watch for late compiles
store.py           what is compiled, what it cost, and the rest meanwhile
kept.py            compiled programs from one run to the next, found without tracing
saved.py           compiled programs in a folder, for another machine
memory_plan.py     where each byte of a device goes
server_programs.py how a server's programs are made, and what they take
report.py          what the compiler says of one program
compiler_errors.py a program that does not fit, read out of the compiler's error
"""
