"""The page of the pool: what it costs who is watched, and its picture in the README.

chromium.py a browser without a window, and what one asks of it
picture.py  the README's picture: `python -m benchmarks.page.picture`
cost.py     what a picture takes of the engine's thread, and a frame of another: `python -m benchmarks.page.cost`
"""
