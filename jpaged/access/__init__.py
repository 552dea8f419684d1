"""Authentication, authorization, quotas and audit. Independent of the protocol: each port calls it at its entrance.

    port ──Entry──> Gate.open ──key, tenant──> Entry ──> the service reads it: tenant, role, quotas
                          └─────> Gate.close: a line of the audit

authenticator.py  authenticator of all ports: keys, quotas and audit of one server
call_context.py   context of a call while it is answered; the role that each HTTP route and gRPC method requires
keys.py           the file of keys: tokens -> tenants, roles, limits
tls.py            the server's certificate, and client CAs; files that are reloaded when they change
"""
