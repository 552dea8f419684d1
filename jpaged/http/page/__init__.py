"""The page of the pool: what it shows, ten times a second, and the little that it does besides sending requests.

hub.py    one look at the pools for all watchers, and what each of them gets of it
paths.py  /, and below /page/
limits.py makes the pools smaller, for who plays
static/   the page itself: no build step, nothing from elsewhere
"""
