"""What others can see of a running server: metrics in Prometheus' format."""
