"""Authentication, authorization, quotas and audit. Independent of the protocol: each port calls it at its entrance.

    port ──Entry──> Gate.open ──key, tenant──> Entry ──> the service reads it: tenant, role, quotas
                          └─────> Gate.close: a line of the audit

gate.py      authenticator of all ports: keys, quotas and audit of one server
entry.py     context of a call while it is answered
permissions.py  the role that each HTTP route and gRPC method requires
keys.py      the file of keys: tokens -> tenants, roles, limits
quotas.py    quotas of each tenant: requests, tokens, streams
watching.py  files that are reloaded when they change
audit.py     a line for each call
certificates.py  TLS: the server's certificate, and client CAs
"""
