"""Request deadlines: expiry of requests in flight, and refusal of requests that cannot meet theirs.

ends.py        deadline heap of groups in flight
"""
