"""Device and host pools: who owns which page, and where its bytes lie."""
