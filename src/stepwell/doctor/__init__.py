"""Check a machine and a configuration against each other, and try the tiers: `stepwell doctor`."""
