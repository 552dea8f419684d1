"""Mixed load on two servers of the demo model, one of which is killed again and again: is every text what it should be?

__main__.py  the run and its report
servers.py   two servers: one that lives, and one that is killed and started again
cases.py     requests, and what they are answered with where nothing goes wrong
loads.py     who asks: by each face, with cancels, deadlines and slow readers
tally.py     what came of it
"""
