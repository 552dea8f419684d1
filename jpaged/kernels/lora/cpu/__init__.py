"""The CPU kernel of adapters: core.cc multiplies, kernel.cc says what is computed where.

lora.py  the call, and whether there is a library for it
"""
