"""A value for every option that only a server has, which is not its default."""

SERVER_VALUES = {
    "served_model_name": "another",
    "host": "0.0.0.0",
    "port": 1,
    "max_request_size": 2.0,
    "shutdown_timeout": 1.0,
    "enable_reflection": False,
    "max_connections": 9,
    "connection_idle_timeout": 9.0,
    "disable_control": True,
    "isolate_tenants": False,
    "max_pinned_blocks": 3,
    "pin_prefix": "file",
    "metrics_port": 9090,
    "max_messages_per_second": 9,
    "http_port": 8000,
    "api_keys": "keys.toml",
    "public_metrics": True,
    "public_page": False,
}
