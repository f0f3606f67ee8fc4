"""Memory that is allocated once and used for ever."""
