"""The way back: locate, plan, read, place."""
