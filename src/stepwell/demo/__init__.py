"""Serve a JAX decoder through all four tiers, kill it, serve again, and compare every logit: `stepwell demo`."""

INSTALL = "pip install '.[demo]' in the checkout (or 'stepwell[demo]' from an index)"
"""How to get what the demo imports."""
