"""Authentication, authorization, quotas and audit. Independent of the protocol: each port calls it at its entrance.

    port ──Entry──> Gate.open ──key, tenant──> Entry ──> the service reads it: tenant, role, quotas
                          └─────> Gate.close: a line of the audit

authenticator.py  authenticator of all ports: context of each call, keys, audit; the role that each method requires
quotas.py         limits of each tenant; none without options or keys
keys.py           the file of keys: tokens -> tenants, roles, limits
tls.py            the server's certificate, and client CAs; files that are reloaded when they change
"""
