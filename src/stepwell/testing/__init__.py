"""Test tiers and stores: the specification as a model in a dict, faults as inputs, a mover that is stepped by hand."""
