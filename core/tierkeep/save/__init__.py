"""The way in: plan, stage, write, commit."""
