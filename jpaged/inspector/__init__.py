"""Views of a running server's KV pool: the dashboard of the HTTP port, and `jpaged top`. An optional part.

dashboard.py   the page's paths, ten frames a second; one snapshot of the pools for all viewers; limits of the pools
frames.py      snapshots as viewers get them: frames, and their encoding
static/        the page: no build step, no external resources
cli.py         top: the pool in a terminal
top_screen.py  the pool drawn in a terminal: frames, numbers, key presses
"""
