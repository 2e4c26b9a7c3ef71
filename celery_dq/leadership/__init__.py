"""Who leads, for how long that may be trusted, and what a leader does: terms, elections, the office."""
