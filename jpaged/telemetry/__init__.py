"""Observability of a server, for all its APIs.

metrics.py  metrics of a loaded model in Prometheus format
scrapes.py  HTTP server for scrapes
traces.py   spans of requests, by OpenTelemetry
logs.py     the log, and a line for each request; observers of a server's requests
"""
