"""Serve a JAX decoder through all four tiers, kill it, serve again, and compare every logit: `stepwell demo`."""
