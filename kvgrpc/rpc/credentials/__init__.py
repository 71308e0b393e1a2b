"""The proofs of callers and servers: secrets, the tokens made with them, the addresses that tokens name, certificates.

``kvgrpc.rpc.security`` has the settings; nothing here knows them.
"""
