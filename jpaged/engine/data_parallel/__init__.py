"""Copies of the model behind one set of verbs.

engine.py    the engines, each with a pool and a thread
entrance.py  where requests are let in, and places kept for those that come later
routing.py   which of them takes a request
"""
