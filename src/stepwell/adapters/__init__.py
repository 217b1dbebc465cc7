"""Embed stepwell in serving engines: one package an engine, each of which uses stepwell's public face alone."""
