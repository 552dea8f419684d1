"""What an operator sees of a server, whatever face a request came by.

metrics.py  a loaded model's numbers in Prometheus' format
scrapes.py  the HTTP server that scrapes come to
"""
