"""Request deadlines: expiry of requests in flight, and refusal of requests that cannot meet theirs.

ends.py        deadline heap of groups in flight
foresight.py   lower bound of the time that a new request will take, including the work ahead of it
"""
