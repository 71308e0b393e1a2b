"""The demo's engines as services, which a router asks over HTTP: ``deploy/compose.yaml`` starts them so."""
