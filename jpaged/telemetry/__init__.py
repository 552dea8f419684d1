"""What an operator sees of a server, whatever face a request came by.

metrics.py  a loaded model's numbers in Prometheus' format
scrapes.py  the HTTP server that scrapes come to
traces.py   spans of requests, by OpenTelemetry
observers.py who watches the requests of a server
logs.py     the log, and a line for each request
"""
