"""Requests that end, or never begin, for want of time.

ends.py        when groups in flight have to end
foresight.py   the least time that a request will take, and what is in front of it
"""
