"""The closed list of programs: their lowering, compilation, caching on disk and memory use.

lowering.py          a server's programs on a mesh, as shapes; how they are made, and their memory use
compile.py           the list, its compile cache, the counter of late compilations
program_registry.py  compiled programs, their compile times, and background compilation
executable_cache.py  compiled programs cached between runs, found without tracing; the digest of KV blocks
aot_bundle.py        compiled programs in a folder, for another machine
memory_plan.py       how the memory of a device is used; the compiler's reports and refusals
"""
