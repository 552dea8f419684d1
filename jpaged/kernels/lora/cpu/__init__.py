"""The CPU kernel of adapters: core.cc multiplies, kernel.cc distributes the work.

lora.py  the call, and the check for a library
"""
