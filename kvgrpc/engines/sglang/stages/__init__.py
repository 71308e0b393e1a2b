"""Pipeline stages of an SGLang engine, which take a request up, and end it, together."""
