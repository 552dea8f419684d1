"""Copies of the model behind one set of verbs.

engine.py    the engines, each with a pool and a thread
routing.py   which of them takes a request
"""
