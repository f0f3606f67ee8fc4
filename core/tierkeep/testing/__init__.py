"""For our tests, and for authors of adapters and tiers."""
