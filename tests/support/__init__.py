"""Tiny models, oracles, servers and fixtures that the tests share."""
