"""One model of dedup against all that enforces it: ``python -m tests.dedup.model --examples 20000``."""
