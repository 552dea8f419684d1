"""What a server does of a request: all of it, its prompt alone, or what comes behind that.

role.py          what a service asks of a role that is not "both"
counts.py        what roles have done
rule.py          which prompts are computed elsewhere
first_tokens.py  a request behind the first token of each of its sequences
answers.py       what a decode server asks of prefill servers, whatever the protocol
ready.py         what both roles need of a loaded model
departure.py     a prompt's blocks, which leave behind its last event
decoding.py      the role decode
prefilling.py    the role prefill
"""
