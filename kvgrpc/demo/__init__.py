"""A small real engine: a Llama over paged memory, a prefix cache, a prefill process that hands over to decode.

``kvgrpc demo`` runs it. Everything of kvgrpc that it uses is what any engine uses. Importing this loads nothing heavy.
"""
