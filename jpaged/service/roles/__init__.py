"""Disaggregated prefill: a server computes whole requests, only their prompts, or only the decode part.

role.py          the interface of a role other than "both"
counts.py        counters of the roles
rule.py          decides which prompts another server computes
first_tokens.py  a request resumed after the first token of each sequence
answers.py       the interface of prefill servers as a decode server sees them, independent of the protocol
ready.py         what both roles need of a loaded model
departure.py     export of a prompt's blocks after the request's last event
decoding.py      the decode role
prefilling.py    the prefill role
"""
