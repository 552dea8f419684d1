"""Who may ask, and for how much: keys, tenants, limits, an audit. It knows no protocol: each port asks at its door.

    port ──Entry──> Gate.open ──key, tenant──> Entry ──> the service asks it: whose call, which role, what is left
                                                 └─────> Gate.close: a line of the audit

gate.py      the door of every port: keys, quotas and audit of one server
entry.py     a call that has come in, while it is answered
permissions.py  the role that each HTTP route and gRPC method requires
keys.py      the file of keys: tokens -> tenants, roles, limits
quotas.py    what each tenant has left: requests, tokens, streams
watching.py  files that are read again when they change
audit.py     a line for each call
certificates.py  TLS: the certificate of the server, and whom it believes
"""
