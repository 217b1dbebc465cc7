"""Serve SGLang's hierarchical cache from stepwell. Importing this package imports neither sglang nor torch."""
