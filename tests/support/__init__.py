"""Real servers and faults that tests stand on."""
