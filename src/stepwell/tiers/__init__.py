"""Hold pages where they lie: device, host, shared memory, disk, behind one contract (base)."""
