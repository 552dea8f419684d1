"""Everything that holds a device array: parameters, the KV pool, compiled programs."""
